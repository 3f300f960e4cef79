"""Where records of a run go: TensorBoard, W&B, Prometheus, and a sink of the user's own. Each runs
in a process of its own (trackers.py) and imports no torch, whose import takes seconds."""

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from elastic.node.files import own_directory, read_text, write_new, write_whole


class Sink(Protocol):
    """Takes what stands in metrics.jsonl, a record at a time.

    Steps after a checkpoint come again when a run resumes from it. A sink that must know has
    `rewind(step)` too: what was recorded from that step on counts no more. Its process calls that
    at its start as well; the one before may have been killed in the midst.
    """

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """One record: `values` by the names of docs/metrics.md, with `time`, in Unix seconds. What
        it leaves in buffers is lost when its process is killed."""

    def close(self) -> None:
        """There will be no more."""


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        directory = run_dir / "tensorboard"
        own_directory(directory)  # names of event files can be guessed
        self._writer = EventFileWriter(str(directory))

    def rewind(self, step: int) -> None:
        """See Sink."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, session_log=start)
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        points = [
            self._summaries.Summary.Value(tag=key, simple_value=value)
            for key, value in values.items()
            if key != "time"
        ]
        summary = self._summaries.Summary(value=points)
        self._writer.add_event(
            self._events.Event(wall_time=values["time"], step=step, summary=summary)
        )
        self._writer.flush()

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. Its id is kept in the run directory, so that a restart continues it. W&B itself
    leaves out the steps that it has already."""

    def __init__(self, run_dir: Path) -> None:
        import wandb

        recipe = _recipe(run_dir)
        tracking = recipe["tracking"]
        id_file = run_dir / "wandb-run-id"
        with suppress(FileExistsError):
            write_new(id_file, secrets.token_hex(4) + "\n")
        own_directory(run_dir / "wandb")  # W&B makes files there, by names that can be guessed
        self._run = wandb.init(
            id=read_text(id_file).strip(),
            resume="allow",
            mode=tracking["wandb"],
            project=tracking["project"],
            name=tracking["name"] or run_dir.name,
            dir=str(run_dir),
            config=recipe,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log({key: value for key, value in values.items() if key != "time"}, step=step)

    def close(self) -> None:
        """See Sink."""
        self._run.finish()


class Prometheus:
    """The newest value of each metric, in a file for the textfile collector of Prometheus's node
    exporter. A file needs no port, which would have to be chosen and guarded, and runs that share a
    machine do not meet there."""

    def __init__(self, run_dir: Path) -> None:
        tracking = _recipe(run_dir)["tracking"]
        self._path = Path(tracking["prometheus"])
        name = str(tracking["name"] or run_dir.name)
        for character, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
            name = name.replace(character, escaped)
        self._label = f'{{run="{name}"}}'
        self._values: dict[str, float] = {}

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        newest = {"step": step, "record_time_seconds": values["time"], **values}
        del newest["time"]
        for key, value in newest.items():
            self._values[f"perdure_{re.sub('[^a-zA-Z0-9_]', '_', key)}"] = value
        lines = (
            f"# TYPE {key} gauge\n{key}{self._label} {value!r}\n"
            for key, value in self._values.items()
        )
        write_whole(self._path, "".join(lines))  # what is beside it is no .prom: it is not read

    def close(self) -> None:
        """The last values stay; the exporter tells how old they are."""


def own_sink(name: str, run_dir: Path) -> Sink:
    """What a function of `tracking.sinks` returns.

    Raises:
        RecipeError: it is not there, or returned something else; whatever it raises itself.
    """
    from trainer.recipe import RecipeError
    from trainer.recipe.factory import import_factory, returned_none

    factory = import_factory("tracking.sinks", name)
    sink: Any = factory(run_dir)
    if sink is None:
        raise RecipeError(f"tracking.sinks: {returned_none(name, factory)}")
    missing = [part for part in ("record", "close") if not callable(getattr(sink, part, None))]
    if missing:
        raise RecipeError(
            f"tracking.sinks: {name} returned {type(sink).__name__}, which has no "
            f"{' and no '.join(missing)}"
        )
    return sink


def _recipe(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load(read_text(run_dir / "recipe.yaml"))
