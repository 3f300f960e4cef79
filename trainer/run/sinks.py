"""Sinks for records of a run: TensorBoard, W&B, Prometheus, and a user's own. Each runs in its own
process (trackers.py), which does not import torch, because that takes seconds.

[Note: the file] W&B stores a run in `run-ID.wandb`, which can be read while it is written. The
file has a header of 7 bytes and blocks of 32 KiB, as LevelDB's log. A record
is one chunk, or several if it crosses the end of a block. A chunk has a CRC, a length and a kind
(whole, first, middle, last). Records are W&B's protocol buffers; one kind is a row of history.
"""

import json
import math
import os
import re
import secrets
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, Protocol

import yaml

from elastic.node.files import (
    is_ours,
    open_to_read,
    own_directory,
    read_text,
    write_new,
    write_whole,
)
from elastic.process import children

STALL_SECONDS = 60.0
"""Seconds without a write of pending records after which W&B is restarted."""
CLOSE_SECONDS, CLOSE_SECONDS_ONLINE = 10.0, 25.0
"""Time limits for W&B to finish at the end; the tracker process itself is killed after 30 s."""
_FLUSH_SECONDS = 0.5
WandbMode = Literal["online", "offline", "shared", "disabled"]
_WANDB_MODES: dict[str, WandbMode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "shared": "shared",
    "disabled": "disabled",
}
"""Values of WANDB_MODE → W&B's mode."""


class Sink(Protocol):
    """Receives the records of metrics.jsonl one by one.

    Steps after a checkpoint are computed again when a run resumes from it. A sink may define
    `rewind(step)`, which is called then: records from that step on are void. It is also called
    before the first record of the sink's process, because an earlier process may have been killed
    at any point. After a partition, records that were void may come again.

    A sink that buffers may define `kept(after)`. It returns the time of the newest record that
    would survive a kill of the process, or `after` if unknown. It is called twice a second; after a
    restart the sink receives the records later than that. Without `kept`, a record counts as stored
    once `record` returns.
    """

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Store one record. `values` have the names in docs/metrics.md, and `time` in Unix seconds.
        A sink that returns before the record is stored must define `kept`."""

    def close(self) -> None:
        """Store what is buffered; called after the last record."""


def group(key: str) -> str:
    """Return the group of a metric in trackers: one of `_GROUPS`, or `training`."""
    return next((name for name, begins in _GROUPS.items() if key.startswith(begins)), "training")


_GROUPS = {
    "run": ("attempt", "world_size", "failures", "steps_lost", "goodput", "skipped_steps"),
    "speed": ("tokens_per_", "mfu", "step_seconds", "data_wait", "bubble", "eta", "peak_memory"),
    "checkpoint": ("checkpoint_",),
    "validation": ("validation_", "recall@", "ndcg@", "popularity_"),
}
"""Group → prefixes of the names of its metrics."""


class TensorBoardSink:
    """A sink that writes TensorBoard's event files to the run directory: curves in groups, and the
    recipe as text and as a row of the hyperparameter table."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        directory = run_dir / "tensorboard"
        own_directory(directory)  # other users can guess the names of event files
        self._writer = EventFileWriter(str(directory))
        recipe = recipe_of(run_dir)
        for summary in (_text("recipe", yaml.safe_dump(recipe, sort_keys=False)), _table(recipe)):
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), summary=summary))

    def rewind(self, step: int) -> None:
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, session_log=start)
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        points = [
            self._summaries.Summary.Value(tag=f"{group(key)}/{key}", simple_value=value)
            for key, value in values.items()
            if key != "time"
        ]
        summary = self._summaries.Summary(value=points)
        self._writer.add_event(
            self._events.Event(wall_time=values["time"], step=step, summary=summary)
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _text(tag: str, text: str) -> Any:
    """Return a summary event that TensorBoard shows as verbatim text."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    shown = indent(text, "    ")  # a code block of Markdown
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype="DT_STRING", string_val=[shown.encode()])
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _table(recipe: Mapping[str, Any]) -> Any:
    """Return a summary event with the recipe as a row of TensorBoard's hyperparameter table."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    return hparams_pb(
        {
            f"{section}.{key}": value
            for section, keys in recipe.items()
            for key, value in keys.items()
            if isinstance(value, bool | int | float | str) and section != "tracking"
        }
    )


class WandbSink:
    """A sink that logs to W&B. A file in the run directory keeps the id of the W&B run, so that
    restarts continue it.

    [Note: W&B's step] W&B ignores a row whose step does not grow, so a repeated step would be lost.
    So the W&B step of a row is the training step, or, if that was used before, the last W&B step
    plus 1. The training step is logged as `step`, which is the x axis of charts.

    [Note: what W&B has] `log` returns before wandb-core has written the row, which it does when the
    next row begins. So `kept` reads W&B's file. Records of one step share a row, unless both have a
    value of the same name, such as two saves that end in one step.
    """

    def __init__(self, run_dir: Path) -> None:
        # Frequent flushes limit what a kill loses, and show early that wandb-core hangs.
        os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", str(_FLUSH_SECONDS))
        import wandb

        _end_core()  # kill the wandb-core of an earlier try that failed
        with suppress(Exception):  # tearing down a killed wandb-core fails
            wandb.teardown()
        recipe = recipe_of(run_dir)
        tracking = recipe["tracking"]
        os.environ["WANDB_MODE"] = mode = wandb_mode(tracking["wandb"])
        id_file = run_dir / "wandb-run-id"
        with suppress(FileExistsError):
            write_new(id_file, secrets.token_hex(4) + "\n")
        run_id = read_text(id_file).strip()
        if not os.environ.get("WANDB_DIR"):
            # Other users can guess the names of W&B's files, and could create them first.
            own_directory(run_dir / "wandb")
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            mode=mode,
            project=tracking["project"],
            name=tracking["name"] or run_dir.name,
            dir=os.environ.get("WANDB_DIR") or str(run_dir),
            config=recipe,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._close_seconds = CLOSE_SECONDS if mode == "offline" else CLOSE_SECONDS_ONLINE
        self._run.define_metric("*", step_metric="step")
        self._file, self._offset = Path(self._run.settings.sync_file), 0
        directory, first = self._file.parent.parent, self._run.starting_step
        self._cut = partial(cut_torn, directory, run_id, self._file)
        self._cut()
        # Online the server decides which rows exist: the file may have more.
        last = last_row(directory, run_id, first - 1 if mode == "online" else math.inf)
        self._kept = last.time if last else 0.0 if mode == "online" and not first else None
        """`time` of the last record that W&B has stored; None: unknown."""
        self._row = max(first - 1, last.step if last else -1)
        self._step, self._keys = -1, set[str]()
        """Training step of the unfinished row, and the names of its values."""
        self._given = self._ended = 0.0
        """`time` of the last record passed to W&B, and of the last record in a finished row."""
        self._since = time.monotonic()
        """When W&B last had stored all records, or stored more, in seconds of `time.monotonic`."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        row = {key: value for key, value in values.items() if key != "time"}
        # In one row W&B would keep only the later of two values of the same name.
        if step != self._step or row.keys() & self._keys:
            self._row, self._step, self._ended = max(step, self._row + 1), step, self._given
            self._keys = set()
        self._keys |= row.keys()
        self._given = values["time"]
        self._run.log({**row, "step": step, "_timestamp": self._given}, step=self._row)

    def kept(self, after: float) -> float:
        """Return the time of the newest record in W&B's file, or `after`, as `Sink` describes.
        Raises TimeoutError if W&B writes nothing more."""
        with suppress(FileNotFoundError):
            rows, self._offset = read_rows(self._file, self._offset)
            if rows:
                self._kept, self._since = rows[-1].time, time.monotonic()
        if self._ended <= (self._kept or 0.0):
            self._since = time.monotonic()
        elif time.monotonic() - self._since > STALL_SECONDS:
            _end_core()
            raise TimeoutError(f"it has written nothing to {self._file} for {STALL_SECONDS:.0f} s")
        return after if self._kept is None else self._kept

    def close(self) -> None:
        hangs = threading.Timer(self._close_seconds, _end_core)
        hangs.daemon = True
        hangs.start()
        self._run.finish()
        hangs.cancel()
        deadline = time.monotonic() + 2.0
        while self.kept(0.0) < self._given and time.monotonic() < deadline:
            time.sleep(0.05)  # wandb-core finishes its file after `finish` returns
        self._cut()  # also files that were too new to be cut at the start


def wandb_mode(requested: str) -> WandbMode:
    """Return W&B's mode: that of the variable WANDB_MODE if it is set, else `requested`, the value
    of `tracking.wandb` (not `off`). Raises RecipeError if WANDB_MODE is invalid."""
    mode = os.environ.get("WANDB_MODE") or requested
    if mode not in _WANDB_MODES:
        from trainer.recipe import RecipeError

        raise RecipeError(
            f"WANDB_MODE={mode} in the environment: none of {', '.join(_WANDB_MODES)}; unset it, "
            "so that tracking.wandb applies"
        )
    return _WANDB_MODES[mode]


def _end_core() -> None:
    """Kill the wandb-core processes that this process started, which may hang."""
    for pid in children(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "wandb-core\n":
                os.kill(pid, signal.SIGKILL)


class PrometheusSink:
    """A sink that writes the newest value of each metric to a file for the textfile collector of
    Prometheus's node exporter. A file, unlike a port, needs no protection from other users."""

    def __init__(self, run_dir: Path) -> None:
        recipe = recipe_of(run_dir)
        self._path = Path(recipe["tracking"]["prometheus"])
        self._run = {"run": recipe["tracking"]["name"] or run_dir.name}
        strategy = recipe["strategy"]
        architecture = recipe["model"]["architecture"] or {}
        about = {
            "model": architecture.get("model_type") or recipe["model"]["init_from"] or "own",
            "strategy": strategy["sharding"] or strategy["name"],
            "dtype": recipe["precision"]["dtype"],
        }
        self._metrics = {"perdure_info": (_HELP["info"], _labels(self._run | about), 1.0)}
        """Name → (help text, labels, newest value)."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        newest = {"step": step, "record_time_seconds": values["time"], **values}
        del newest["time"]
        for key, value in newest.items():
            name = f"perdure_{re.sub('[^a-zA-Z0-9_]', '_', key)}"
            name += "_total" if key in _COUNTERS else ""
            help_ = _HELP.get(key, f"{key}; see docs/metrics.md")
            self._metrics[name] = help_, _labels(self._run), value
        text = "".join(
            f"# HELP {name} {help_}\n"
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"{name}{labels} {value!r}\n"
            for name, (help_, labels, value) in self._metrics.items()
        )
        write_whole(self._path, text)  # the collector ignores temporary files: no .prom suffix

    def close(self) -> None:
        """Does nothing: the last values stay, and the exporter reports their age."""


_COUNTERS = ("failures", "steps_lost")
"""Metrics of Prometheus's type counter, which never decrease. Steps and tokens are gauges, because
they decrease when a run resumes."""
_HELP = {
    "info": "What is trained, and how; always 1",
    "step": "Optimizer steps done",
    "record_time_seconds": "Unix time of the newest values",
    "loss": "Mean loss of the last step, nats per token",
    "grad_norm": "Norm of the gradient before clipping",
    "lr": "Learning rate",
    "tokens": "Tokens consumed since the beginning of the run",
    "tokens_per_second": "Tokens per second over all ranks",
    "mfu": "Share of the peak FLOP/s, 0 to 1",
    "eta_seconds": "Seconds to the last step",
    "step_seconds_p50": "Median of step times, seconds",
    "data_wait": "Share of the time spent waiting for data, 0 to 1",
    "peak_memory": "Bytes of memory of rank 0 at the peak",
    "smallest_share": "Least that a rank has of a global batch, under batch.balance",
    "largest_share": "Most that a rank has of a global batch, under batch.balance",
    "validation_loss": "Loss over the validation set, nats per token",
    "validation_perplexity": "Perplexity over the validation set",
    "checkpoint_seconds": "Seconds that the newest save took",
    "checkpoint_failed": "The newest save failed",
    "attempt": "Starts of the ranks",
    "world_size": "Ranks",
    "failures": "Failures that the run has recovered from",
    "steps_lost": "Steps that had to be done again",
    "goodput": "Share of the time in steps whose result survived, 0 to 1",
}


def _labels(pairs: Mapping[str, Any]) -> str:
    table = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inside = ",".join(f'{key}="{str(value).translate(table)}"' for key, value in pairs.items())
    return f"{{{inside}}}"


def own_sink(name: str, run_dir: Path) -> Sink:
    """Create a sink by the user's function that `tracking.sinks` names. Raises RecipeError if it is
    missing or returned no sink, and any error that it raises."""
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


def recipe_of(run_dir: Path) -> dict[str, Any]:
    """Return the run's recipe without `tracking.alerts`: their webhook URLs must stay secret."""
    recipe: dict[str, Any] = yaml.safe_load(read_text(run_dir / "recipe.yaml"))
    recipe["tracking"].pop("alerts", None)
    return recipe


_BLOCK_BYTES, _HEADER_BYTES = 32 << 10, 7
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_TAIL_BLOCKS = 4
_CHANGE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STILL_SECONDS = 2.0


@dataclass(frozen=True)
class _WandbHistoryRow:
    """A row of a run's history: W&B's step, and the time of its last record in Unix seconds."""

    step: int
    time: float


def last_row(directory: Path, run_id: str, up_to: float = math.inf) -> _WandbHistoryRow | None:
    """Return the newest row with a W&B step of at most `up_to` in all files of a run; None if there
    is none. `directory`: where W&B has a folder for each start and resume of the run."""
    found = []
    for path in _files(directory, run_id):
        with suppress(OSError):  # the file is being removed, or cannot be read
            for start in (_tail(path), 0):
                rows = [row for row in read_rows(path, start)[0] if row.step <= up_to]
                if rows:
                    found.append(rows[-1])
                    break
    return max(found, key=lambda row: row.time, default=None)


def cut_torn(directory: Path, run_id: str, own: Path) -> None:
    """Cut off incomplete records that a kill left at the end of a run's files: `wandb sync` would
    stop there, and skip later files. `own`, the file being written, is not cut, and neither are
    files that changed less than 2 s before it. `directory`: see `last_row`."""
    if not own.exists():
        return
    now = own.stat().st_mtime  # the filesystem's clock, which also set the other files' times
    for path in _files(directory, run_id):
        with suppress(OSError), os.fdopen(os.open(path, _CHANGE), "r+b") as file:
            size, start = os.fstat(file.fileno()), _tail(path)
            whole = read_rows(path, start)[1]
            if whole == start > 0:  # the incomplete record begins in an earlier block
                whole = read_rows(path, 0)[1]
            if path != own and now - size.st_mtime > _STILL_SECONDS and whole < size.st_size:
                file.truncate(whole)


def read_rows(path: Path, offset: int) -> tuple[list[_WandbHistoryRow], int]:
    """Read the rows after an offset; returns them and the offset of the first incomplete record.
    `offset`: the start of a block, or a result of this function. Raises OSError if the file is
    missing, not a regular file, or belongs to another user."""
    with os.fdopen(open_to_read(path), "rb") as file:
        if not is_ours(os.fstat(file.fileno()), path.parent):
            raise PermissionError(f"{path} belongs to another user")
        offset = offset or _HEADER_BYTES
        file.seek(offset)
        data = file.read()
    rows = []
    for record, end in _records(data, offset):
        offset = end
        if record and (row := _row(record)):
            rows.append(row)
    return rows, offset


def _files(directory: Path, run_id: str) -> Iterator[Path]:
    return directory.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")


def _tail(path: Path) -> int:
    """Return the offset of the last _TAIL_BLOCKS blocks of a file."""
    return max(0, path.stat().st_size // _BLOCK_BYTES - _TAIL_BLOCKS) * _BLOCK_BYTES


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield (record, file offset of its end) for each complete record in `data`, which begins at
    file offset `start`. What follows a damaged record in its block is yielded as an empty
    record."""
    at = start
    parts: list[bytes] = []
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _CHUNK.size:  # padding at the end of a block
            at += left
            continue
        body = at - start + _CHUNK.size
        if body > len(data):
            return
        crc, length, kind = _CHUNK.unpack_from(data, at - start)
        part = data[body : body + length]
        fits = _CHUNK.size + length <= left and _WHOLE <= kind <= _LAST
        if fits and len(part) < length:  # the chunk is still being written
            return
        if not fits or zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            at, parts = at + left, []
            if at - start > len(data):
                return
            yield b"", at
            continue
        at += _CHUNK.size + length
        if kind in (_WHOLE, _FIRST):
            parts = [part]
        elif parts:  # a record whose first part is missing is skipped
            parts.append(part)
        if parts and kind in (_WHOLE, _LAST):
            yield b"".join(parts), at
            parts = []


def _row(record: bytes) -> _WandbHistoryRow | None:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    parsed = Record()
    try:
        parsed.ParseFromString(record)
        if parsed.WhichOneof("record_type") != "history":
            return None
        for item in parsed.history.item:
            if "_timestamp" in (item.key, *item.nested_key):
                moment = float(json.loads(item.value_json))
                if math.isfinite(moment):
                    return _WandbHistoryRow(parsed.history.step.num, moment)
    except (DecodeError, ValueError, TypeError):
        return None
    return None
