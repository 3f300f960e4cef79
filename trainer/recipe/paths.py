"""Paths of a recipe that look like URLs: a folder called `s3:` is never what was meant. Where a
machine keeps what it needs of a run in a bucket."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.recipe.sections import Recipe

_LIKE_URL = re.compile(
    r"\s*(?:([a-z][a-z0-9+.-]+):/|(s3a?|gs|gcs|abfss?|az|hf|file|https?):)", re.IGNORECASE
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]")
_NO_STORES = ("file", "http", "https", "hf")
"""Schemes under which no checkpoint can be written."""
_RUN = re.compile(r"s3://[^/\s]+(?:/[^/\s]+)+/?")


def like_url(path: str) -> str:
    """The scheme of what is, or was to be, a URL; empty for a path. `./s3:/a` is a path."""
    found = _LIKE_URL.match(path)
    return found[1] or found[2] if found else ""


def no_url(path: str) -> str | None:
    """What is wrong with a path that has to be one of a filesystem; None if nothing is."""
    scheme = like_url(path)
    if not scheme:
        return None
    cure = "mount that storage, or copy it here, and give its path"
    if scheme.lower() == "file":
        cure = f"write /{path.partition(':')[2].lstrip('/')}"
    return f"{path!r} looks like a URL ({scheme}:), and has to be a path of a filesystem; {cure}"


def in_bucket(run: str) -> bool:
    """Whether a `run.dir` is a folder of a bucket."""
    return bool(_RUN.fullmatch(run)) and not {".", ".."} & {*run.split("/")}


def local_copy(url: str) -> Path:
    """The directory in which this machine keeps what it needs of a run in a bucket. Its name is
    that of the run."""
    url = url.rstrip("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return cache.absolute() / "perdure" / "runs" / digest / url.rpartition("/")[2]


def wrong_paths(recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Pairs of (key, what is wrong and what to do) for all paths of a recipe."""
    data, tracking = recipe.data, recipe.tracking
    paths = {
        "run.dir": recipe.run.dir,
        "model.init_from": recipe.model.init_from,
        **{f"data.sources.{place}.path": one.path for place, one in enumerate(data.sources)},
        "data.graph.path": data.graph and data.graph.path,
        "strategy.offload_directory": recipe.strategy.offload_directory,
        "checkpoint.slot_directory": recipe.checkpoint.slot_directory,
        "tracking.prometheus": tracking.prometheus,
    }
    for key, path in paths.items():
        if path and (what := no_url(path)):
            if key == "run.dir":
                if in_bucket(path):
                    continue
                what += (
                    "; a run may also lie in a folder of a bucket (s3://bucket/folder), and its "
                    "checkpoints alone in any object store (checkpoint.directory)"
                )
            yield key, what
    directory = recipe.checkpoint.directory
    scheme = like_url(directory or "")
    if directory and scheme and (not _URL.match(directory) or scheme in _NO_STORES):
        yield (
            "checkpoint.directory",
            f"{directory!r} is no URL of an object store; write it as s3://bucket/folder (s3, gs, "
            "abfs, …), or give a path of a filesystem",
        )
