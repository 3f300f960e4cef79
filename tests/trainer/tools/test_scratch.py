"""Temporary folders of commands: a killed one's is deleted by the next, a living one's is not."""

import os
import signal
import tempfile

import pytest

from trainer.recipe import RecipeError
from trainer.tools.mirror import scratch_folder


def test_what_a_killed_command_leaves_is_deleted_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "perdure-of-others"
    other.mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with scratch_folder() as folder:
            (folder / "file").touch()
            os.write(writer, b".")
            signal.pause()
    try:
        os.read(reader, 1)
        (theirs,) = {*tmp_path.iterdir()} - {other}
        with scratch_folder() as ours:
            assert {*tmp_path.iterdir()} == {other, theirs, ours}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with scratch_folder() as ours:
        assert {*tmp_path.iterdir()} == {other, ours}
    assert [*tmp_path.iterdir()] == [other]


def test_without_a_temporary_folder_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        pytest.raises(RecipeError, match="No such file or directory; set TMPDIR"),
        scratch_folder(),
    ):
        pass
