"""A filesystem that passes everything through, except for the faults that a JSON file tells it of:
{"open": {"errno": "EIO", "times": 2}, "fsync": {"seconds": 5}, "write": {"bytes_per_second": 1e6}}

    python -m tests.checkpointing.faulty_fs ROOT MOUNT_POINT CONTROL_FILE
"""

import errno
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations


class FaultyFiles(Operations):
    use_ns = True

    def __init__(self, root: str, control: str) -> None:
        self.root, self.control = root, Path(control)
        self.given: Counter[str] = Counter()

    def at(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def fault(self, call: str, nbytes: int = 0) -> None:
        fault = json.loads(self.control.read_text() or "{}").get(call, {})
        if not fault or self.given[json.dumps(fault)] >= fault.get("times", 10**9):
            return
        self.given[json.dumps(fault)] += 1
        time.sleep(fault.get("seconds", 0))
        time.sleep(nbytes / fault.get("bytes_per_second", 1e18))
        if "errno" in fault:
            raise FuseOSError(getattr(errno, fault["errno"]))

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self.at(path))
        names = ("atime", "ctime", "mtime")
        times = {f"st_{name}": getattr(status, f"st_{name}_ns") for name in names}
        plain = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid")
        return times | {name: getattr(status, name) for name in plain}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self.at(path))]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.fault("create")
        return os.open(self.at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        self.fault("open")
        return os.open(self.at(path), os.O_RDWR)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.fault("write", len(data))
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.fault("fsync")
        os.fsync(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self.at(path), length)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def rename(self, old: str, new: str) -> int:
        self.fault("rename")
        os.rename(self.at(old), self.at(new))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self.at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self.at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self.at(path))
        return 0


if __name__ == "__main__":
    root, mount_point, control = sys.argv[1:]
    FUSE(FaultyFiles(root, control), mount_point, foreground=True, nothreads=False)
