"""Which files are taken from what people have on disk: splits by name, links, what lies beside."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.inspect import inspect
from trainer.data.prepare.inputs import find_inputs, split_by_name
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import DataError, TokenDataset, read_index


def make(folder: Path, *names: str) -> Path:
    """Files that hold their own name, ten times."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{name} {number}" for number in range(10)]
        match path.suffix:
            case ".parquet":
                pq.write_table(pa.table({"text": texts}), path)
            case ".arrow":
                table = pa.table({"text": texts})
                with pa.ipc.new_stream(str(path), table.schema) as stream:
                    stream.write_table(table)
            case ".jsonl":
                path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
            case _:
                path.write_text("\n".join(texts))
    return folder


def taken(out: Path, split: str) -> list[str]:
    """Names of the files whose texts are in a split."""
    dataset = TokenDataset(out, split)
    if not dataset.tokens:
        return []
    text = bytes(dataset.read(0, dataset.tokens).clip(0, 255).astype("u1")).decode("latin-1")
    return sorted({line.split(" ")[0] for line in text.replace("\n", "\xff").split("\xff") if line})


@pytest.mark.parametrize(
    ("files", "train", "validation"),
    [
        (  # of the Hub
            [f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")],
            ["data/train-00000-of-00001.parquet"],
            ["data/validation-00000-of-00001.parquet"],
        ),
        (  # of datasets.DatasetDict.save_to_disk
            [f"{split}/data-00000-of-00001.arrow" for split in ("train", "validation", "test")],
            ["train/data-00000-of-00001.arrow"],
            ["validation/data-00000-of-00001.arrow"],
        ),
        (  # a folder for each configuration
            [f"{name}/{split}-0.jsonl" for name in ("en", "fr") for split in ("train", "test")],
            ["en/train-0.jsonl", "fr/train-0.jsonl"],
            [],
        ),
        (["wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"], *[["wiki.train.txt"]], None),
        (["a.jsonl", "dev.jsonl", "test/b.jsonl"], ["a.jsonl"], ["dev.jsonl"]),
        (["c4.jsonl", "c4-eval_2.jsonl", "c4.Test.jsonl"], ["c4.jsonl"], ["c4-eval_2.jsonl"]),
        (["train.jsonl", "val/x.txt"], ["train.jsonl"], ["val/x.txt"]),
        # These are books, and pages of a manual.
        (["The last test.txt", "Valid reasons.txt"], ["The", "Valid"], []),
        (["docs/testing.md", "docs/dev/a.md"], ["docs/dev/a.md", "docs/testing.md"], []),
        (["contest.jsonl", "invalid.jsonl"], ["contest.jsonl", "invalid.jsonl"], []),
        # There is nothing else.
        (["test.jsonl"], ["test.jsonl"], []),
    ],
)
def test_files_go_to_the_splits_that_their_names_say(tmp_path, capsys, files, train, validation):
    folder = make(tmp_path / "in", *files)
    index = prepare([str(folder)], tmp_path / "out", tokenizer="bytes", progress=True)
    said = capsys.readouterr().err
    if validation is None:
        validation = ["wiki.valid.txt"]
    if validation:
        assert taken(tmp_path / "out", "train") == train
        assert taken(tmp_path / "out", "validation") == validation
        assert f"validation split: {', '.join(validation)}, by the names; --splits ignore" in said
        assert f"{validation[0]}: " in inspect(tmp_path / "out")
        assert inspect(tmp_path / "out").count("all for validation") == len(validation)
    else:
        both = [
            name for split in ("train", "validation") for name in taken(tmp_path / "out", split)
        ]
        assert sorted(set(both)) == train
    left_out = len(files) - len(index["sources"])
    assert ("left out as test split: " in said) == bool(left_out)
    for file in files:
        assert ("test" not in file.lower().replace("contest", "") or file in said) or not left_out
    index = prepare([str(folder)], tmp_path / "all", tokenizer="bytes", splits="ignore")
    assert len(index["sources"]) == len(files)


def test_splits_of_files_and_folders_that_are_named_one_by_one(tmp_path):
    folder = make(tmp_path, "train/a.jsonl", "dev/a.jsonl", "test/a.jsonl")
    names = [str(folder / split) for split in ("train", "dev", "test")]
    for inputs in (names, [f"{name}/a.jsonl" for name in names]):
        found = find_inputs(inputs, "text", by_name=True)
        assert found.files == [f"{name}/a.jsonl" for name in names[:2]]
        assert found.validation == {f"{names[1]}/a.jsonl"}
        assert "left out as test split: test/a.jsonl, by the names" in "\n".join(found.notes)
    with pytest.raises(DataError, match=r"no file remains for training: dev/a\.jsonl .*--splits"):
        find_inputs(names[1:], "text", by_name=True)
    assert len(find_inputs(names[1:], "text", by_name=False).files) == 2
    assert split_by_name(["test", "train-1.jsonl"]) == "train"


def test_a_validation_split_of_files_is_all_of_it_unless_a_share_is_wanted(tmp_path):
    folder = make(tmp_path / "in", "train.jsonl", "validation.jsonl")
    for share, documents in ((None, [10, 10]), (0.999, [0, 20])):
        out = tmp_path / str(share)
        index = prepare([str(folder)], out, tokenizer="bytes", validation_fraction=share)
        assert [part["documents"] for part in index["splits"].values()] == documents
    index = prepare([str(folder)], tmp_path / "bpe", train_bpe=300)
    without = make(tmp_path / "without", "train.jsonl")
    prepare([str(without)], tmp_path / "bpe2", train_bpe=300)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("bpe", "bpe2")]
    assert tokenizers[0] == tokenizers[1]  # it has not learnt from what is held out


def test_links_are_followed_and_what_leads_nowhere_is_named(tmp_path, capsys):
    folder = make(tmp_path / "in", "a.jsonl", "deep/b.jsonl")
    make(tmp_path / "elsewhere", "c.jsonl", "more/d.jsonl")
    make(tmp_path, "alone.jsonl")
    for name, target in {
        "part2": "../elsewhere",
        "same": "../elsewhere/more",  # is read already
        "e.jsonl": "../alone.jsonl",
        "here": ".",
        "deep/back": "../deep",
        "up": "..",
        "gone.parquet": "/nowhere/x.parquet",
        "not-mounted": "/nowhere",
        "itself": "itself",
        ".lock": "host:123",
    }.items():
        (folder / name).symlink_to(target)
    (tmp_path / "elsewhere" / "round").symlink_to(folder)
    index = prepare([str(folder)], tmp_path / "out", tokenizer="bytes", progress=True)
    files = [os.path.relpath(source["file"], folder) for source in index["sources"]]
    assert files == ["a.jsonl", "deep/b.jsonl", "e.jsonl", "part2/c.jsonl", "part2/more/d.jsonl"]
    said = capsys.readouterr().err
    assert "links that cannot be followed, left out: " in said
    for broken in (
        f"{folder}/gone.parquet -> /nowhere/x.parquet (No such file or directory)",
        f"{folder}/itself -> itself (Too many levels of symbolic links)",
        f"{folder}/not-mounted -> /nowhere (No such file or directory)",
        f"{folder}/up -> .. (a parent of this folder)",
    ):
        assert broken in said
    assert said.count(" -> ") == 4
    with pytest.raises(DataError, match=r"cannot be followed: .*/gone\.parquet -> "):
        prepare([str(folder)], tmp_path / "out2", tokenizer="bytes", on_bad="fail")


def test_a_table_beside_the_data_is_not_data(tmp_path, capsys):
    folder = make(tmp_path / "in", "a.jsonl")
    (folder / "sources.csv").write_text("id,url\n1,x\n")
    (folder / "more.csv").write_text("text,url\nmore,x\n")
    index = prepare([str(folder)], tmp_path / "out", tokenizer="bytes", progress=True)
    assert [Path(source["file"]).name for source in index["sources"]] == ["a.jsonl", "more.csv"]
    assert "left out as not data: sources.csv; name a file" in capsys.readouterr().err


CLOSED = """
import os
from trainer.data.prepare.inputs import find_inputs
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
find_inputs(["."], "text", by_name=True)
"""


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path):
    folder = make(tmp_path, "in/a.jsonl", "in/closed/b.jsonl") / "in"
    (folder / "closed").chmod(0)
    command = [sys.executable, "-c", CLOSED]  # starts in a folder that the other user cannot reach
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    (folder / "closed").chmod(0o700)
    assert "DataError: closed: cannot be read: Permission denied" in done.stderr


def test_names_of_odd_bytes_are_kept_and_shown_harmlessly(tmp_path, capsys):
    folder = make(tmp_path / "in", "test\x1b[2J.jsonl")
    (folder / os.fsdecode(b"a\xff.txt")).write_bytes(b"a text\n\xe4\n")
    index = prepare(
        [str(folder)], tmp_path / "out", tokenizer="bytes", split_documents="line", progress=True
    )
    assert read_index(tmp_path / "out") == index
    assert index["sources"][0]["file"] == str(folder / os.fsdecode(b"a\xff.txt"))
    assert "a\\udcff.txt:2: not UTF-8" in inspect(tmp_path / "out")
    said = capsys.readouterr().err
    assert "left out as test split: test\\x1b[2J.jsonl" in said
    assert "\x1b" not in said
