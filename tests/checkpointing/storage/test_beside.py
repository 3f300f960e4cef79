"""What comes along beside weights: all of it, and nothing from elsewhere."""

import os

import pytest

from checkpointing.storage import source
from checkpointing.storage.source import beside_weights


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_all_but_weights_and_what_is_hidden_comes_along(tmp_path):
    small = {"config.json", "vocab.bpe", "modeling.py", "code/deep/own.py", "notes"}
    fill(tmp_path, *small)
    fill(tmp_path, "model-00001-of-00001.safetensors", "model.safetensors.index.json", "x/a.onnx")
    fill(tmp_path, "x/config.json", ".git/config", "code/__pycache__/own.pyc", "trainer_state.json")
    assert beside_weights(tmp_path) == ({name: name.encode() for name in small}, "")


def test_links_lead_nowhere_but_to_where_the_hub_has_its_files(tmp_path):
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "0123"
    fill(model, "blobs/one", "blobs/two", "other/three")
    fill(snapshot, "here")
    for name, target in {
        "config.json": "../../blobs/one",
        "additional_chat_templates/a.jinja": "../../../blobs/two",
        "also": "here",
        "three": "../../other/three",
        "passwd": "/etc/passwd",
        "gone": "nowhere",
        "round": ".",
    }.items():
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(target)
    os.mkfifo(snapshot / "pipe")
    fill(snapshot, "a\nb")
    files, left = beside_weights(snapshot)
    assert files.keys() == {"config.json", "additional_chat_templates/a.jinja", "also", "here"}
    assert files["config.json"] == b"blobs/one"
    why = "no file that can be read, or a link that leads elsewhere"
    assert left == f"a\\nb: no printable name; gone, passwd, pipe and 2 more: {why}"
    (model / "blobs").rename(tmp_path / "blobs")
    (model / "blobs").symlink_to(tmp_path / "blobs")
    assert beside_weights(snapshot)[0].keys() == {"also", "here"}


@pytest.mark.parametrize(("most", "count"), [(4, 9), (99, 2)])
def test_of_too_much_the_largest_is_left_out(tmp_path, monkeypatch, most, count):
    monkeypatch.setattr(source, "MOST_BYTES", most)
    monkeypatch.setattr(source, "MOST_FILES", count)
    fill(tmp_path, "a", "abc", "ab")
    files, left = beside_weights(tmp_path)
    assert files == {"a": b"a", "ab": b"ab"}
    assert left == f"abc: more than {count} files or 0 MiB together"
