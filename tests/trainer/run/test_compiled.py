"""Compiled code is kept where no other user can put any."""

import getpass
import os
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils

from trainer.recipe import RecipeError
from trainer.run.compiled import INDUCTOR, TRITON, keep_caches_closed

STRANGER = 65534


@pytest.fixture
def place(tmp_path, monkeypatch):
    for variable in (INDUCTOR, TRITON):
        monkeypatch.setenv(variable, "")
        del os.environ[variable]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "perdure" / "compiled"


def test_a_closed_directory_of_the_user_is_made(place, tmp_path):
    before = os.umask(0)
    try:
        keep_caches_closed(tmp_path / "run")
    finally:
        os.umask(before)
    assert os.environ[INDUCTOR] == str(place)
    assert os.environ[TRITON] == str(place / "triton")
    assert place.stat().st_mode & 0o777 == 0o700
    keep_caches_closed(tmp_path / "run")  # as at a restart
    assert not (tmp_path / "run").exists()


def spoilt(kind, place):
    """What a stranger may have made before us."""
    place.parent.mkdir(parents=True)
    if kind == "link":
        (place.parent / "elsewhere").mkdir()
        place.symlink_to(place.parent / "elsewhere")
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        if kind == "another user's":
            os.chown(place, STRANGER, STRANGER)
        if kind == "writable":
            place.chmod(0o770)
        if kind == "replaceable":
            place.parent.chmod(0o777)


KINDS = ["link", "file", "writable", "replaceable"] + ["another user's"] * (os.geteuid() == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_could_have_written_to_is_not_used(kind, place, tmp_path, monkeypatch):
    spoilt(kind, place)
    keep_caches_closed(tmp_path / "run")
    assert os.environ[INDUCTOR] == str(tmp_path / "run" / "compiled")
    for variable in (INDUCTOR, TRITON):
        monkeypatch.setenv(variable, str(place))
        with pytest.raises(RecipeError, match=f"{variable}: .*compiled.* only you can write to"):
            keep_caches_closed(tmp_path / "run")
        monkeypatch.delenv(variable)
    (tmp_path / "run" / "compiled").chmod(0o777)
    with pytest.raises(RecipeError, match="no place for compiled code"):
        keep_caches_closed(tmp_path / "run")


def test_a_directory_that_the_user_names_and_nobody_else_can_write_to_is_kept(
    place, tmp_path, monkeypatch
):
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    keep_caches_closed(tmp_path / "run")
    assert os.environ[INDUCTOR] == str(tmp_path / "mine")
    assert os.environ[TRITON] == str(tmp_path / "mine" / "triton")
    assert not place.exists()


def test_torch_looks_there_and_not_where_a_stranger_can_be_first(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap = tmp_path / f"torchinductor_{getpass.getuser()}"
    assert cache_dir_utils.default_cache_dir() == str(trap), "so it does by default"
    trap.mkdir()
    assert cache_dir_utils.cache_dir() == os.environ[INDUCTOR] == str(trap), "and says so itself"
    keep_caches_closed(tmp_path / "run")
    assert cache_dir_utils.cache_dir() == str(place)
    assert Path(cache_dir_utils.triton_cache_dir(0)).is_relative_to(place)
    trap.chmod(0o775)  # torch makes it so where the umask is 002
    keep_caches_closed(tmp_path / "run", compiles=True)
    trap.chmod(0o777)  # as a stranger would have it: torch's headers lie there in any case
    (trap / "header").touch()
    with pytest.raises(RecipeError, match=r"strategy\.compile: others may write to .*TMPDIR"):
        keep_caches_closed(tmp_path / "run", compiles=True)
