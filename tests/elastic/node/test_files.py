"""Files in a directory where others may have put something first."""

import os
import stat
from pathlib import Path

import pytest

from elastic.node.files import open_to_append, own_directory, read_text, write_new, write_whole
from elastic.record.ledger import Ledger, StartLine

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users' files take root to make")


@pytest.fixture
def precious(tmp_path):
    file = tmp_path / "home"
    file.write_text("precious\n")
    return file


def put_aside(directory: Path, name: str) -> list[Path]:
    return list(directory.glob(f"{name}.not-ours-*"))


def test_a_file_is_replaced_and_what_its_name_led_to_is_left_alone(tmp_path, precious):
    path = tmp_path / "recipe.yaml"
    path.symlink_to(precious)
    for pid in range(os.getpid() - 2, os.getpid() + 3):  # by any name that could be guessed
        (tmp_path / f".recipe.yaml.{pid}").symlink_to(precious)
    write_whole(path, "new")
    assert precious.read_text() == "precious\n"
    assert not path.is_symlink()
    assert read_text(path) == "new"
    assert sum(one.is_symlink() for one in tmp_path.iterdir()) == 5


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_what_is_no_file_of_ours_alone_is_put_aside_before_lines_are_added(
    tmp_path, precious, kind, caplog
):
    path = tmp_path / "ledger.jsonl"
    match kind:
        case "link":
            path.symlink_to(precious)
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with Ledger(path, StartLine(step=0, sequences=0, global_batch=1, world_size=1)):
        pass
    assert precious.read_text() == "precious\n"
    assert not (tmp_path / "nowhere").exists()
    assert path.is_file()
    assert len(put_aside(tmp_path, path.name)) == 1
    assert f"{path} was " in caplog.text
    assert f"uid {os.getuid()}" in caplog.text


def test_a_file_with_a_second_name_goes_on_as_a_copy(tmp_path, precious):
    """A backup by hard links stays as it is; so does a file that a member has linked to."""
    path = tmp_path / "ledger.jsonl"
    os.link(precious, path)
    precious.chmod(0o600)
    with Ledger(path, StartLine(step=0, sequences=0, global_batch=1, world_size=1)):
        pass
    assert precious.read_text() == "precious\n"
    assert path.read_text().startswith("precious\n{")
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == sorted({path, precious})


@needs_root
def test_a_file_of_another_user_grows_only_if_he_is_trusted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("his\n")
    os.chown(path, STRANGER, STRANGER)
    os.close(open_to_append(path, {STRANGER}))
    assert path.read_text() == "his\n"
    os.close(open_to_append(path))
    assert path.read_text() == ""
    assert [one.read_text() for one in put_aside(tmp_path, path.name)] == ["his\n"]


@needs_root
def test_a_folder_is_closed_to_the_group_and_another_users_is_put_aside(tmp_path):
    ours, his = tmp_path / "recipes", tmp_path / "tensorboard"
    ours.mkdir()
    ours.chmod(0o2775)
    his.mkdir()
    os.chown(his, STRANGER, STRANGER)
    for path in (ours, his):
        own_directory(path)
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
        assert path.stat().st_uid == os.getuid()
    assert len(put_aside(tmp_path, "tensorboard")) == 1
    assert not put_aside(tmp_path, "recipes")


def test_nothing_is_waited_for_and_no_link_followed_in_reading(tmp_path, precious):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "link", "zero"):
        with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
            read_text(tmp_path / name)
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", "text")
    assert precious.read_text() == "precious\n"
