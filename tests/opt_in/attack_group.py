"""A member of the group that a run directory belongs to (mode 2775) against the user who trains
there with umask 002: files of that user elsewhere, his steps, his restarts. See attack.py."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from isal.isal_zlib import crc32

PRECIOUS = b"precious\n"
NAMES = (
    *("ledger.jsonl", "metrics.jsonl", "recipe.yaml", "launch.json", "launch.lock"),
    *("micro_batch.json", "wandb-run-id", ".tracker-tensorboard.json", "recipes", "tensorboard"),
)
"""In a run directory, where members put links first."""


def attack_group(
    scratch: Path,
    train: Callable[..., "subprocess.CompletedProcess[bytes]"],
    drop_rights: Callable[[], None],
    sealed: Callable[[dict], str],
    attempt: Callable[[str, bool], None],
) -> None:
    """Try everything.

    Args:
        scratch: a directory of root's that others may enter.
        train: runs the trainer in it to its end, with overrides of the recipe.
        drop_rights: makes this process the stranger's.
        sealed: a commit record with a right checksum.
        attempt: is told what was tried, and whether the stranger got what he wanted.
    """
    run, home = scratch / "shared", scratch / "home"
    home.mkdir(mode=0o700)
    files = {name: home / name for name in (*NAMES, "elsewhere")}
    for path in files.values():
        path.write_bytes(PRECIOUS)
        path.chmod(0o600)
    gid = as_stranger(drop_rights, os.getgid)
    run.mkdir()
    os.chown(run, -1, gid)
    run.chmod(0o2775)
    umask = os.umask(0o002)
    rest = [
        "run.dir=shared",
        "checkpoint.every=10",
        "checkpoint.keep=1",
        "tracking.tensorboard=true",
    ]

    def unharmed(when: str) -> None:
        for name, path in files.items():
            attempt(f"{when}: changed a private file by {name}", path.read_bytes() != PRECIOUS)
        attempt(f"{when}: made a file in a private folder", {*home.iterdir()} != {*files.values()})

    def links() -> None:
        for name, path in files.items():
            (run / name).symlink_to(path)
            for pid in range(2, 2000):
                (run / f".{name}.{pid}").symlink_to(path)

    as_stranger(drop_rights, links)
    done = train(*rest, "run.steps=10")
    attempt(
        f"the first run ended with {done.returncode}: {done.stderr[-300:]!r}", done.returncode != 0
    )
    unharmed("links where files are made")

    checkpoints = run / "checkpoints"
    good = checkpoints / "step-00000010"
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    for what, change in changes(good):
        attempt(f"a committed step: {what}", as_stranger(drop_rights, change))
    attempt(
        "changed a committed step", any(path.read_bytes() != was for path, was in before.items())
    )

    def plant() -> None:
        for number in (20, 30, 99999999):  # one that is due, and newer ones
            forge(good, checkpoints / f"step-{number:08}", number, sealed)
        (checkpoints / "step-00000040").symlink_to(home)
        with suppress(OSError):
            (checkpoints / "latest").unlink()
        (checkpoints / "latest").symlink_to(home / "elsewhere")

    as_stranger(drop_rights, plant)
    locker = hold_locks(run, drop_rights)
    try:
        done = train(*rest, "run.steps=25")
    finally:
        os.kill(locker, signal.SIGKILL)
        os.waitpid(locker, 0)
    attempt(
        f"the second run ended with {done.returncode}: {done.stderr[-300:]!r}", done.returncode != 0
    )
    starts = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    begun = [line["step"] for line in starts if line["kind"] == "start"]
    attempt(f"a run began at steps {begun}, not at 0 and at its own step 10", begun != [0, 10])
    unharmed("planted steps and locks")
    attempt("the last step is not there", not (checkpoints / "step-00000025").is_dir())
    attempt("a planted step was deleted", not (checkpoints / "step-99999999").is_dir())
    os.umask(umask)


def changes(step: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """What a member may try with a step: (what, how, which says whether it went well)."""
    weights = next(step.glob("model*.safetensors"))
    yield "write to its weights", lambda: allowed(lambda: os.open(weights, os.O_RDWR))
    yield "put a file into it", lambda: allowed((step / "new").touch)
    yield "replace its weights", lambda: allowed(lambda: os.rename(weights, step / "old"))
    yield "delete its record", lambda: allowed((step / "index.json").unlink)


def allowed(action: Callable[[], object]) -> bool:
    """Whether the system lets it happen."""
    try:
        action()
    except OSError:
        return False
    return True


def forge(good: Path, copy: Path, number: int, sealed: Callable[[dict], str]) -> None:
    """A step with other weights whose checksums are right."""
    shutil.copytree(good, copy)
    weights = next(copy.glob("model*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-4000] + bytes(4000))
    state = json.loads((copy / "trainer_state.json").read_text())
    state |= {"step": number, "sequences": 8 * number}
    (copy / "trainer_state.json").write_text(json.dumps(state))
    record = json.loads((copy / "index.json").read_text()) | {"step": number}
    for name in (weights.name, "trainer_state.json"):
        data = (copy / name).read_bytes()
        record["files"][name] = {"bytes": len(data), "crc32": [f"{crc32(data):08x}"]}
    (copy / "index.json").write_text(sealed(record))


def hold_locks(run: Path, drop_rights: Callable[[], None]) -> int:
    """Start a process of the stranger that locks whatever he may open below a directory, over and
    over; returns its id."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.read(ready, 1)
        return pid
    drop_rights()
    held: dict[Path, int] = {}
    while True:
        for path in run.rglob("*"):
            with suppress(OSError):
                if path not in held and path.is_file():
                    held[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    fcntl.flock(held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):
            os.write(told, b"x")
        os.close(told) if told >= 0 else None
        told = -1
        time.sleep(0.01)


def as_stranger(drop_rights: Callable[[], None], action: Callable[[], object]) -> int:
    """What `action` returns (a small number) in a process of the stranger."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            drop_rights()
            os.umask(0o022)
            os.write(told, str(int(action() or 0)).encode())
            os._exit(0)
        except BaseException as error:
            print(f"a stranger failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(told)
    answer = os.read(ready, 20)
    os.close(ready)
    assert os.waitpid(pid, 0)[1] == 0, "a stranger failed"
    return int(answer)
