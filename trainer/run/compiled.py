"""Directories for compiled code that no other user can write to.

torch's inductor and triton execute what they find in their caches. Another user can create the
default cache, `torchinductor_USER` in the temporary directory, first.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from trainer.recipe import RecipeError

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Environment variables that name the caches of torch and of triton."""


def keep_caches_closed(run_directory: Path, compiles: bool = False) -> None:
    """Set the cache directories of this process and its children to ones that no other user can
    write to. Called before anything is compiled. Raises RecipeError if there are none.

    Args:
        run_directory: holds the cache if the user's own cache directory is not safe.
        compiles: whether the recipe sets `strategy.compile`. Then torch's default directory must be
            safe too.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # On import torch sets INDUCTOR to its default, which is then not the user's choice.
    if os.environ.get(INDUCTOR) == default_cache_dir():
        del os.environ[INDUCTOR]
    # torch puts C++ headers into the default directory, whatever INDUCTOR says.
    default = Path(default_cache_dir())
    with suppress(OSError):
        if default.lstat().st_uid == os.geteuid() and not any(default.iterdir()):
            default.chmod(0o700)  # torch created the directory with the mode of the umask
    if compiles and (why := _open_to_others(default)):
        raise RecipeError(
            f"strategy.compile: {why}, and torch compiles with headers that it finds there; remove "
            "it, or set TMPDIR to a directory that only you can write to"
        )
    for variable in (INDUCTOR, TRITON):
        if (named := os.environ.get(variable)) and (why := _open_to_others(Path(named))):
            raise RecipeError(
                f"{variable}: {why}; code in this directory is run, so name one that only you can "
                "write to, or unset the variable"
            )
    if INDUCTOR not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        places = (cache / "perdure" / "compiled", run_directory.absolute() / "compiled")
        found: list[str] = []
        for place in places:
            if not (why := _open_to_others(place)):
                os.environ[INDUCTOR] = str(place)
                break
            found.append(why)
        else:
            raise RecipeError(
                f"no place for compiled code that only this user can write to: {'; '.join(found)}; "
                f"set {INDUCTOR} to a directory that only you can write to"
            )
    os.environ.setdefault(TRITON, f"{os.environ[INDUCTOR]}/triton")


def _open_to_others(path: Path) -> str:
    """Return why other users could place code in `path`, which is created; "" if they cannot."""
    try:
        for above in reversed(path.parents):
            above.mkdir(mode=0o755, exist_ok=True)  # not writable for others, whatever the umask
        path.mkdir(mode=0o700, exist_ok=True)
        # O_NOFOLLOW, because the owner of a link could redirect the link later.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            own, around = os.fstat(descriptor), os.stat(path.parent)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if own.st_uid != os.geteuid():
        return f"{path} belongs to uid {own.st_uid}, not to uid {os.geteuid()}"
    if own.st_mode & 0o022:
        return f"others may write to {path} (mode {stat.S_IMODE(own.st_mode):o})"
    # A user who may rename the directory could replace it; under a sticky bit only its owner may.
    writable = around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX
    if writable or around.st_uid not in (0, os.geteuid()):
        return (
            f"{path} may be replaced by others: {path.parent} has mode "
            f"{stat.S_IMODE(around.st_mode):o} and belongs to uid {around.st_uid}"
        )
    return ""
