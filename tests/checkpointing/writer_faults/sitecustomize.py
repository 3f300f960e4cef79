"""Watches and kills a writer process from inside; the engine knows nothing of it.

A test puts this folder first on `sys.path`, which the engine hands on to its writer processes; each
imports this file before all else. What happens there is said, as JSON, in WRITER_FAULTS:

    root            calls on files below it, or in shared memory, are points
    log             a file that gets a line for every point
    kill            the point at which to die: its label, and the how manieth of that label
    hang            the point at which not to come back; what it is about is not done
    who             "writer" dies alone, or "all": the rank that started it dies too
    once            a file; who finds it there does not die or hang any more
    shared_memory   a folder to use in place of /dev/shm
    free            bytes of memory that there seem to be
    flip            names of steps of which a bit of a tensor flips once they are committed

The label of a point is the call and the file, without the owner: "fsync step-00000002.tmp" or
"mkdir memory/slot-0".
"""

import json
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

CALLS = (
    "open", "pwrite", "fsync", "ftruncate", "posix_fallocate",
    "mkdir", "rename", "replace", "unlink", "rmdir",
)  # fmt: skip
OWNER = re.compile(r"((?:\.tmp|\.trash)-|/perdure-)[^/]*")

faults = json.loads(os.environ.get("WRITER_FAULTS", "{}"))
counts: Counter[str] = Counter()
lock = threading.Lock()
pwrite = os.pwrite


def path_of(subject, dir_fd=None) -> str:
    if isinstance(subject, int):
        return os.readlink(f"/proc/self/fd/{subject}")
    if dir_fd is not None:
        return f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{os.fspath(subject)}"
    return os.path.abspath(os.fspath(subject))


def label_of(call: str, path: str) -> str | None:
    root = faults["root"]
    if path.startswith(root):
        return f"{call} {OWNER.sub(lambda found: found[1], path.removeprefix(root).lstrip('/'))}"
    if "/perdure-" in path:
        return f"{call} {OWNER.sub('memory', path[path.index('/perdure-') :])}"
    return None


def watched(call: str):
    original = getattr(os, call)

    def wrapper(subject, *arguments, **keywords):
        path = path_of(subject, keywords.get("dir_fd"))
        label = label_of(call, path)
        if label:
            with lock:
                counts[label] += 1
                nth = counts[label]
            if [label, nth] == faults.get("kill"):
                die(call, subject, arguments)
            if [label, nth] == faults.get("hang") and is_first():
                threading.Event().wait()
        result = original(subject, *arguments, **keywords)
        if call == "rename" and os.path.basename(arguments[0]) in faults.get("flip", ()):
            flip(Path(arguments[0], "model-00001-of-00001.safetensors"))
        if label and "log" in faults:
            creates = call == "open" and arguments[0] & os.O_CREAT
            target = path_of(arguments[0]) if call in ("rename", "replace") else None
            line = [label, "create" if creates else call, path, target]
            with lock, Path(faults["log"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return result

    return wrapper


def is_first() -> bool:
    try:
        Path(faults["once"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(call: str, subject, arguments) -> None:
    if not is_first():
        return
    if call == "pwrite":  # torn: half of it is written
        data, offset = arguments
        pwrite(subject, data[: len(data) // 2], offset)
    if faults["who"] == "all":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


if "root" in faults:
    for name in CALLS:
        watcher = watched(name)
        if getattr(os, name) in os.supports_dir_fd:  # shutil looks there for what it may use
            os.supports_dir_fd.add(watcher)
        setattr(os, name, watcher)
if "shared_memory" in faults:
    from checkpointing.save import slots
    from checkpointing.storage import folders

    folders.SHARED_MEMORY = Path(faults["shared_memory"])
    if "free" in faults:
        slots.available_bytes = lambda: faults["free"]
