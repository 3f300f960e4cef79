"""Chats on disk: prepared, looked at, damaged; and as sequences of whole chats."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.chat_families import PLAIN, THINKING, VARIABLES, tokenizer
from trainer.data.inspect import as_page, as_text, inspect, sample
from trainer.data.loader import TokenStream, load
from trainer.data.packing import DocumentBins, best_fit
from trainer.data.prepare import tokenise
from trainer.data.prepare.prepare import prepare, what_to_type
from trainer.data.shards import DataError, TokenDataset, read_index, verify
from trainer.data.stream import CONSUMED, COUNTED


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tokenizer with a chat template, as a model's directory has it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**VARIABLES, "chat_template": PLAIN}))
    (folder / "thinking.jinja").write_text(THINKING)
    return folder


@pytest.fixture
def here(monkeypatch):
    """Have this process do what workers would."""
    units = lambda jobs, workers: ((job.number, tokenise._tokenise_unit(job)) for job in jobs)  # noqa: E731
    monkeypatch.setattr(tokenise, "_run", units)


def record(number):
    """A chat of one to three answers."""
    turns = 1 + number % 3
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number}, {turn}? " + "x" * (number % 7)})
        messages.append({"role": "assistant", "content": "Two and " * (number * turn % 11) + "4."})
    return {"messages": messages}


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


RECORDS = [record(number) for number in range(120)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory, home):
    """RECORDS, by workers; not to be changed."""
    folder = tmp_path_factory.mktemp("chats")
    file = write(folder / "chats.jsonl", RECORDS)
    options = {"tokenizer": str(home), "chat": True, "shard_tokens": 1500, "workers": 2}
    prepare([file], folder / "data", validation_fraction=0.2, **options)
    return folder / "data"


def documents_of(path, split="train"):
    """(text, trained tokens decoded, trained) of each document."""
    dataset, tokens = TokenDataset(path, split), tokenizer()
    start, found = 0, []
    for length in dataset.lengths().tolist():
        ids, trained = dataset.read(start, length), dataset.read_trained(start, length)
        texts = [
            tokens.decode(some.tolist(), skip_special_tokens=False) for some in (ids, ids[trained])
        ]
        found.append((*texts, trained))
        start += length
    return found


def test_chats_on_disk_are_what_was_found(chats, tmp_path, home, here, capsys):
    index = read_index(chats)
    assert (index["format"], index["kind"], index["documents"]) == (2, "chats", 120)
    splits = index["splits"]
    assert len(splits["train"]["shards"]) > 2
    assert 5 < splits["validation"]["documents"] < 50
    found = {text: trained for split in splits for text, trained, _ in documents_of(chats, split)}
    expected = {}
    for one in RECORDS:
        parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in one["messages"]]
        answers = [
            f"{m['content']}<|im_end|>\n" for m in one["messages"] if m["role"] == "assistant"
        ]
        expected["".join(parts)] = "".join(answers)
    assert found == expected
    for split in splits:
        counts = [int(trained.sum()) for *_, trained in documents_of(chats, split)]
        assert sum(counts) == splits[split]["trained"] == TokenDataset(chats, split).trained
    # The same in one process, and in one shard; then every option makes it another data set.
    file = str(chats.parent / "chats.jsonl")
    same = {"tokenizer": str(home), "chat": True, "validation_fraction": 0.2}
    again = prepare([file], tmp_path / "again", shard_tokens=1500, **same)
    assert again["fingerprint"] == index["fingerprint"]
    assert verify(tmp_path / "again") == []
    prints = {index["fingerprint"]}
    others = [
        {"turns": "each"}, {"turns": "last"}, {"loss": "all"}, {"date": "2026-01-31"},
        {"template_options": '{"x": 1}'}, {"template": str(home / "thinking.jinja")},
        {"max_tokens": 40}, {"max_tokens": 40, "too_long": "cut"}, {"spelled": "letters"},
    ]  # fmt: skip
    for number, option in enumerate(others):
        other = prepare([file], tmp_path / str(number), shard_tokens=1500, **same, **option)
        prints.add(other["fingerprint"])
        sizes = {split: other["splits"][split] for split in splits}
        if option.get("turns") == "each":
            assert other["documents"] == 240
            assert sum(one["trained"] for one in sizes.values()) == sum(
                one["trained"] for one in splits.values()
            )
        if "max_tokens" in option:
            lengths = np.concatenate(
                [TokenDataset(tmp_path / str(number), s).lengths() for s in splits]
            )
            assert lengths.max() <= 40
            assert (other["rejected"] > 0) == ("too_long" not in option) or other["rejected"] < 40
    assert len(prints) == 1 + len(others)
    rejects = (tmp_path / "6" / "rejects.jsonl").read_text().splitlines()
    assert (
        "tokens, more than --max-tokens 40; --too-long cut keeps"
        in json.loads(rejects[0])["problem"]
    )
    capsys.readouterr()
    prepare([file], tmp_path / "again", shard_tokens=1500, progress=True, **same)
    assert "is up to date" in capsys.readouterr().err
    write(tmp_path / "in.jsonl", RECORDS[:3])
    prepare(
        [str(tmp_path / "in.jsonl")],
        tmp_path / "one",
        progress=True,
        **same,
        template=str(home / "thinking.jinja"),
    )
    assert "2 of 3 chats are rendered differently once" in capsys.readouterr().err


def test_forms_pairs_and_tables(tmp_path, home, here, capsys):
    said = RECORDS[0]["messages"]
    options = {"tokenizer": str(home), "validation_fraction": 0.0}
    records = [
        {"messages": said}, {"instruction": "Q", "output": "A"}, {"prompt": "Q", "completion": "A"},
        {"messages": [{"role": "user", "content": "<|im_end|>"}, *said]}, {"text": "x"}, 3,
        {"messages": [{"role": "user", "content": "\ud800"}, *said]},
    ]  # fmt: skip
    file = write(tmp_path / "mixed.jsonl", records)
    index = prepare([file], tmp_path / "mixed", chat=True, **options)
    assert (index["documents"], index["rejected"]) == (3, 4)
    rejects = [json.loads(line) for line in (tmp_path / "mixed" / "rejects.jsonl").open()]
    assert [one["line"] for one in rejects] == [4, 5, 6, 7]
    assert [one["problem"][:24] for one in rejects] == [
        "a text spells the specia", "no chat: it has neither ", "a number, not an object",
        "a text has half of a sur",
    ]  # fmt: skip
    pairs = [{"prompt": f"Q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(9)]
    half = {**options, "validation_fraction": 0.5}
    index = prepare([write(tmp_path / "p.jsonl", pairs)], tmp_path / "pairs", pairs=True, **half)
    assert (index["kind"], index["documents"]) == ("pairs", 18)
    for split in ("train", "validation"):
        answers = [trained for _, trained, _ in documents_of(tmp_path / "pairs", split)]
        assert len(answers) > 2
        for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
            assert chosen.replace("good", "bad") == rejected
    # What is too long is dropped, counted and listed, both answers of it.
    lengths = TokenDataset(tmp_path / "pairs", "train").lengths().reshape(-1, 2).sum(1)
    pairs[0]["chosen"] = "good " * 9
    limit = {**options, "pairs": True, "max_tokens": int(lengths.max())}
    long = write(tmp_path / "long.jsonl", pairs)
    index = prepare([long], tmp_path / "short", **limit)
    assert (index["documents"], index["rejected"]) == (16, 1)
    assert "tokens in both answers, more than --max" in (
        (tmp_path / "short" / "rejects.jsonl").read_text()
    )
    index = prepare([long], tmp_path / "cut", **limit, too_long="cut")
    assert (index["documents"], index["rejected"]) == (18, 0)
    cut = TokenDataset(tmp_path / "cut", "train").lengths()
    assert cut[0] == lengths.max() // 2
    index = read_index(tmp_path / "cut")
    index["splits"]["train"]["documents"] = 17
    (tmp_path / "cut" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"splits.train.documents: odd, but pairs have two answers"):
        read_index(tmp_path / "cut")
    with pytest.raises(DataError, match=r"short: holds pairs, and .*mixed chats, which cannot be"):
        TokenStream.open(
            [(tmp_path / "mixed", 1.0), (tmp_path / "short", 1.0)],
            split="train", seq_len=80, seed=1, shuffle=False,
        )  # fmt: skip
    # A table fills up with nulls what an object does not have.
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    rows = [*said, {"role": "assistant", "content": None, "tool_calls": [call]}]
    pq.write_table(pa.table({"messages": [said, rows], "n": [1, 2]}), tmp_path / "t.parquet")
    prepare([str(tmp_path / "t.parquet")], tmp_path / "table", chat=True, **options)
    assert [trained for _, trained, _ in documents_of(tmp_path / "table")] == [
        "4.<|im_end|>\n", '4.<|im_end|>\n<tool_call>f {"x": 1}</tool_call><|im_end|>\n',
    ]  # fmt: skip
    # Nobody has to know the flags.
    write(tmp_path / "chats.jsonl", RECORDS[:2])
    line = "type perdure data prepare {} --chat --tokenizer MODEL_DIRECTORY --out data/chats"
    assert line.format(file) in what_to_type([file])
    assert "--pairs --tokenizer MODEL_DIRECTORY" in what_to_type([str(tmp_path / "p.jsonl")])
    assert "--chat" in what_to_type([str(tmp_path / "t.parquet")])
    plain = write(tmp_path / "plain.jsonl", [{"text": "x"}])
    assert what_to_type([plain]).startswith("--out: name the directory")
    for name, hint in (
        ("chats.jsonl", "chats; use --chat"),
        ("t.parquet", "chats; use --chat"),
        ("p.jsonl", "pairs; use --pairs"),
    ):
        with pytest.raises(DataError, match=f"it has .*; these are {hint}"):
            prepare([str(tmp_path / name)], tmp_path / "no", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat": False, "turns": "each"}, "--turns: only for chats and pairs"),
        ({"pairs": True}, "give one of --chat and --pairs"),
        ({"chat": False, "pairs": True, "turns": "last"}, "--turns: cannot be used with --pairs"),
        ({"train_bpe": 300, "tokenizer": None}, "--train-bpe: cannot be used with --chat"),
        ({"field": "x"}, "--field: cannot be used with --chat"),
        ({"too_long": "cut"}, "--too-long cut: add --max-tokens"),
        ({"max_tokens": 1}, "--max-tokens must be at least 2"),
        ({"template_options": "[]"}, "--template-options: not a JSON object"),
        ({"date": "tomorrow"}, "--date tomorrow: no day; write it as"),
        ({"template": "nowhere"}, "nowhere: cannot be read: No such file"),
        ({"template": "bad.jinja"}, "bad.jinja, line 1: not a chat template: "),
        ({"template": "today.jinja"}, "writes today's date, .* such as --date 20"),
        ({"tokenizer": "bytes"}, "this tokenizer has no template .*--template FILE"),
        ({"turns": "some"}, "--turns must be one of auto, all, each, last"),
        ({"inputs": ["in.txt"]}, "in.txt: plain text has no chats"),
    ],
)
def test_wrong_use_of_chats_is_one_clear_line(tmp_path, monkeypatch, home, here, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", RECORDS[:2])
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "bad.jinja").write_text("{% for a in b")
    (tmp_path / "today.jinja").write_text("{{ strftime_now('%Y') }}" + PLAIN)
    given = {"inputs": ["in.jsonl"], "tokenizer": str(home), "chat": True, **options}
    with pytest.raises(DataError, match=message) as raised:
        prepare(given.pop("inputs"), "out", **given)
    assert "\n" not in str(raised.value)


def test_damage_of_what_is_trained_is_found(chats, tmp_path):
    copied = shutil.copytree(chats, tmp_path / "data")
    file = copied / "train-00001.trained"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    (problem,) = verify(copied)
    assert problem.startswith(f"{file}: wrong checksum in the 16 MiB from byte 0")
    with pytest.raises(DataError, match=f"^{file}: damaged: its trained tokens have changed"):
        open_stream(copied)
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"^{file}: truncated"):
        open_stream(copied)
    file.unlink()
    assert verify(copied)[0].startswith(f"{file}: No such file")
    index = read_index(copied)
    for change, why in (
        ({"chats": {**index["chats"], "turns": "last"}}, "was edited"),
        ({"kind": "pairs"}, "was edited"),
        ({"kind": "songs"}, "kind: not one of chats, pairs"),
    ):
        (copied / "index.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(DataError, match=why):
            read_index(copied)


def test_a_look_at_chats_shows_ids_and_what_is_trained(chats, tmp_path, home, here):
    shown = inspect(chats)
    assert "trained tokens" in shown
    assert "chats by the template sha256:" in shown
    assert "document 0" not in shown, "letters may look like tokens"
    bad = "\x1b[31m<script>alert(1)</script>\u202e"
    messages = [{"role": "user", "content": bad}, {"role": "assistant", "content": bad}]
    options = {"tokenizer": str(home), "chat": True, "validation_fraction": 0.0}
    prepare([write(tmp_path / "x.jsonl", [{"messages": messages}] * 2)], tmp_path / "x", **options)
    documents = sample(tmp_path / "x", 3)
    assert [one.number for one in documents] == [0, 1]
    trained = [(number, text) for number, text, counts in documents[0].tokens if counts]
    tokens = tokenizer()
    assert "".join(text for _, text in trained).endswith("<|im_end|>\n")
    plain, coloured = (as_text(documents, 80, colour=colour) for colour in (False, True))
    end = tokens.token_to_id("<|im_end|>")
    assert plain.count(f"{end}[<|im_end|>]") == 4
    assert plain.count(f"*{end}[<|im_end|>]") == 2
    assert f"\x1b[1;32m{end}[<|im_end|>]\x1b[0m" in coloured
    assert "\x1b" not in plain
    assert set(coloured.split("\x1b")[1:]) <= {
        one for one in coloured.split("\x1b")[1:] if one.startswith("[")
    }
    assert "\u202e" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    page = as_page("a<b>", documents)
    assert "<script" not in page
    assert "a&lt;b&gt;" in page
    assert f'<span class="t">&lt;|im_end|&gt;<sub>{end}</sub></span>' in page
    assert "\x1b" not in page


# --- sequences ------------------------------------------------------------------------------------


def one_by_one(lengths, room):
    """`best_fit` as it is said, a document at a time."""
    left = sorted(
        (n for n, length in enumerate(lengths) if 1 < length <= room),
        key=lambda n: (-lengths[n], n),
    )
    bins = []
    while left:
        space, members = room, []
        for document in list(left):
            if lengths[document] <= space:
                space -= lengths[document]
                members.append(document)
                left.remove(document)
        bins.append(members)
    return bins


@given(st.lists(st.integers(1, 24), max_size=60), st.integers(2, 22))
def test_bins_are_best_fit_and_hold_each_document_once(lengths, room):
    documents, starts = best_fit(np.asarray(lengths, np.int64), room)
    found = [documents[a:b].tolist() for a, b in pairwise(starts)]
    assert sorted(found) == sorted(one_by_one(lengths, room))


def open_stream(path, seq_len=160, split="train", shuffle=True, **options):
    given = {"split": split, "seq_len": seq_len, "seed": 1, "shuffle": shuffle}
    return TokenStream.open([(path, 1.0)], **given, documents="document_ids", **options)


def test_sequences_are_whole_chats_and_labels_what_is_trained(chats):
    stream, dataset = open_stream(chats), TokenDataset(chats, "train")
    assert stream.left_out == 0
    batch = stream.fetch(range(stream.sequences))
    rows, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    assert batch[COUNTED] == dataset.trained == (batch["labels"] != -100).sum()
    found = []
    for row, label, ids in zip(rows, labels, batch["document_ids"].tolist(), strict=True):
        assert sorted(ids) == ids
        for number in range(ids[-1] + 1):
            here = [place for place, one in enumerate(ids) if one == number]
            tokens = [row[place] for place in here]
            wanted = [label[place] for place in here]
            if number == ids[-1] and set(tokens) == {dataset.eos_id}:
                assert set(wanted) == {-100}, "padding is not trained"
                continue
            assert wanted[-1] == -100
            for after, one in zip(tokens[1:], wanted, strict=False):
                assert one in (-100, after)
            found.append((tokens, [False, *(one != -100 for one in wanted[:-1])]))
    start, expected = 0, []
    for length in dataset.lengths().tolist():
        trained = dataset.read_trained(start, length).tolist()
        expected.append((dataset.read(start, length).tolist(), trained))
        start += length
    assert sorted(found) == sorted(expected)
    assert "of them trained" in stream.describe(4)
    # The order is that of the bins, and another epoch another.
    twice = stream.fetch(range(stream.sequences, 2 * stream.sequences))["input_ids"].tolist()
    assert sorted(twice) == sorted(rows)
    assert twice != rows
    # The first ones of a validation set are like the rest, not the longest chats.
    bins = DocumentBins(dataset, 160)
    sizes = [
        int((row.documents == row.documents[0]).sum())
        for row in (bins.read(n, documents=True) for n in range(bins.sequences))
    ]
    assert sizes != sorted(sizes, reverse=True)


def test_both_answers_of_a_pair_are_in_one_sequence(tmp_path, home, here):
    records = [
        {"prompt": f"Q{n}", "chosen": "good " * (n % 5 + 1), "rejected": f"bad {n}"}
        for n in range(30)
    ]
    file = write(tmp_path / "in.jsonl", records)
    prepare([file], tmp_path / "p", tokenizer=str(home), pairs=True, validation_fraction=0.0)
    dataset = TokenDataset(tmp_path / "p", "train")
    lengths = dataset.lengths()
    ends, sizes = lengths.cumsum(), lengths.reshape(-1, 2).sum(1)
    for seq_len in (3 * int(sizes.max()), int(np.median(sizes))):
        stream = open_stream(tmp_path / "p", seq_len)
        fits = np.flatnonzero(sizes <= seq_len)
        assert (stream.left_out, stream.paired) == (30 - len(fits), True)
        stream.reference = np.arange(60, dtype=np.float32)
        seen = []
        for positions in ([0, 1], *([n] for n in range(2, stream.sequences))):
            batch = stream.fetch(positions)
            numbers = batch["reference"].long().tolist()
            assert batch[COUNTED] * 2 == len(numbers) == len(batch["answer_labels"])
            assert [n + 1 for n in numbers[::2]] == numbers[1::2], "chosen, then rejected"
            counted = batch["labels"] != -100
            for place, number in enumerate(numbers):
                labels = batch["labels"][counted & (batch["segments"] == place)]
                begin, length = int(ends[number] - lengths[number]), int(lengths[number])
                trained = dataset.read_trained(begin, length)
                assert labels.tolist() == dataset.read(begin, length)[trained].tolist()
                assert batch["answer_labels"][place] == trained.sum() > 0
            seen += numbers
        assert sorted(seen) == [n for pair in fits for n in (2 * pair, 2 * pair + 1)]
        assert "pairs," in stream.describe(4)
        assert "reference" not in stream.in_file_order.fetch([0])
    assert len(fits) < 30


def test_digests_fingerprints_and_what_is_left_out(chats, prepared, home):
    stream = open_stream(chats)
    ((batch, digest), (halves)) = (
        stream.fetch_with_digest([0, 1, 2]),
        [stream.fetch_with_digest(some) for some in ([0], [1, 2])],
    )
    assert digest == tuple(
        sum(part) & 0xFFFFFFFF for part in zip(*(d for _, d in halves), strict=True)
    )
    assert sum(half[COUNTED] for half, _ in halves) == batch[COUNTED]
    for packed in load(stream, [[0, 1], [2]], workers=1, pin_memory=False, account=True):
        assert packed[COUNTED] == (packed["labels"] != -100).sum()
        assert CONSUMED in packed
    short = open_stream(chats, seq_len=40)
    assert short.left_out > 0
    assert (short.fetch(range(short.sequences))["document_ids"] >= 0).all()
    with pytest.raises(
        DataError, match=r"all of its .* documents in the train split are longer than"
    ):
        open_stream(chats, seq_len=8)
    back_to_back = open_stream(chats, pack="stream")
    flat = TokenDataset(chats, "train")
    counts = flat.read_trained(0, flat.tokens)[1 : 1 + 160 * back_to_back.sequences]
    found = back_to_back.fetch(range(back_to_back.sequences))
    assert found[COUNTED] == counts.sum()
    plain = TokenStream.open([(prepared, 1.0)], split="train", seq_len=64, seed=1, shuffle=False)
    assert COUNTED not in plain.fetch([0])
    whole = open_stream(prepared, pack="whole", seq_len=400, shuffle=False)
    batch = whole.fetch(range(whole.sequences))
    kept = TokenDataset(prepared, "train").lengths()
    assert batch[COUNTED] == (kept - 1).sum(), "of other documents all but the first is a label"
    prints = {one.fingerprint for one in (stream, short, back_to_back, plain, whole)}
    assert len(prints) == 5
    assert torch.equal(open_stream(chats).fetch([5])["labels"], stream.fetch([5])["labels"])
