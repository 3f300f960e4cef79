"""Types and forms of single values of a recipe: numbers with bounds, which pydantic checks when it
builds a dataclass; paths, which must not be URLs where a filesystem is needed; the local directory
for a run in a bucket; conditions of `tracking.alerts`. Imports no torch."""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from annotated_types import Ge, Le, Lt

if TYPE_CHECKING:
    from trainer.recipe.sections import Recipe

Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]
Position: TypeAlias = Annotated[int, Ge(1), Le(2**53)]
Amount: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]

# Also matches likely typos: a single slash after any scheme, none after a known one.
_LIKE_URL = re.compile(
    r"\s*(?:([a-z][a-z0-9+.-]+):/|(s3a?|gs|gcs|abfss?|az|hf|file|https?):)", re.IGNORECASE
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]")
_NO_STORES = ("file", "http", "https", "hf")
"""URL schemes that no object store has."""
_RUN = re.compile(r"(?:s3|gs|az|abfs)://[^/\s]+(?:/[^/\s]+)+/?")
"""URLs of folders in stores that can create an object on the condition that it does not exist."""


def like_url(path: str) -> str:
    """Return the scheme of a text that looks like a URL; "" for a path, such as `./s3:/a`."""
    matched = _LIKE_URL.match(path)
    return matched[1] or matched[2] if matched else ""


def no_url(path: str) -> str | None:
    """Return why `path` cannot be a path of a filesystem, and what to do; None if it can."""
    scheme = like_url(path)
    if not scheme:
        return None
    cure = "mount that storage, or copy it here, and give its path"
    if scheme.lower() == "file":
        cure = f"write /{path.partition(':')[2].lstrip('/')}"
    return f"{path!r} looks like a URL ({scheme}:), and has to be a path of a filesystem; {cure}"


def no_place(path: str) -> str | None:
    """Return why `path` can be neither a path of a filesystem nor the URL of an object store, and
    what to do; None if it can."""
    scheme = like_url(path)
    if not scheme or (_URL.match(path) and scheme not in _NO_STORES):
        return None
    cure = "write it as s3://bucket/folder (s3, gs, abfs, …), or give a path of a filesystem"
    if scheme.lower() == "file":
        cure = f"write /{path.partition(':')[2].lstrip('/')}"
    if scheme.lower() == "hf":
        cure = "fetch it with `hf download`, and give its path"
    return f"{path!r} is no URL of an object store; {cure}"


def in_bucket(run: str) -> bool:
    """Return whether a value of `run.dir` is a folder in a bucket."""
    return bool(_RUN.fullmatch(run)) and not {".", ".."} & {*run.split("/")}


def local_copy(url: str) -> Path:
    """Return the local directory for a run in a bucket. Its last part is the name of the run."""
    url = url.rstrip("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return cache.absolute() / "perdure" / "runs" / digest / url.rpartition("/")[2]


def wrong_paths(recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for each path of a recipe that is wrong."""
    data, tracking = recipe.data, recipe.tracking
    paths = {
        "run.dir": recipe.run.dir,
        "data.cache.directory": data.cache and data.cache.directory,
        "strategy.offload_directory": recipe.strategy.offload_directory,
        "checkpoint.slot_directory": recipe.checkpoint.slot_directory,
        "tracking.prometheus": tracking.prometheus,
    }
    for key, path in paths.items():
        if path and (what := no_url(path)):
            if key == "run.dir":
                if in_bucket(path):
                    continue
                if like_url(path).lower() == "hf":
                    what = (
                        f"{path!r} looks like a URL (hf:), whose store cannot create a file on the "
                        "condition that it does not exist: two launches could train in one run"
                    )
                what += (
                    "; a run may lie in a folder of a bucket (s3://bucket/folder, gs://, az://), "
                    "and its checkpoints alone in any object store (checkpoint.directory)"
                )
            yield key, what
    places = {
        "checkpoint.directory": recipe.checkpoint.directory,
        "model.init_from": recipe.model.init_from,
        **{f"data.sources.{place}.path": one.path for place, one in enumerate(data.sources)},
    }
    for key, path in places.items():
        if path and (what := no_place(path)):
            yield key, what
    for key, path in (paths | places).items():
        if path and path.startswith("~/"):
            yield key, f"{path!r}: only a shell expands ~; write ${{HOME}}{path[1:]}"
    if not recipe.run.dir.strip():
        yield "run.dir", "is empty; name a directory for the files of the run"


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class RecipeThresholdAlert:
    """Condition of an alert that holds while the metric `key` is above, or below, a number."""

    key: str
    above: bool
    """Whether the condition is `key > number`; else it is `key < number`."""
    number: float


@dataclass(frozen=True)
class RecipeSilenceAlert:
    """Condition of an alert that holds when there was no record for `seconds` seconds."""

    seconds: float


@dataclass(frozen=True)
class RecipeFailureAlert:
    """Condition of an alert that holds after ranks were restarted because of a failure."""


AlertCondition = RecipeThresholdAlert | RecipeSilenceAlert | RecipeFailureAlert


def parse_condition(text: str) -> AlertCondition | None:
    """Parse the `when` of an alert; None if the text is no condition."""
    text = text.strip()
    if text == "failure":
        return RecipeFailureAlert()
    if matched := re.fullmatch(r"no step for (\d+(?:\.\d+)?) ?(s|min|h)", text):
        return RecipeSilenceAlert(float(matched[1]) * _SECONDS[matched[2]])
    if matched := re.fullmatch(rf"([\w@]+) *([<>]) *({_NUMBER})", text, re.ASCII):
        return RecipeThresholdAlert(matched[1], matched[2] == ">", float(matched[3]))
    return None
