"""Kinds of filesystems: how they are told, and what suits them."""

import logging
import os
import shutil
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

STRIPE_BYTES = "16M"
"""Lustre stripe size: a block of ours lies on one storage target."""

PREALLOCATING = {"ext4", "xfs", "btrfs", "tmpfs"}
"""Filesystems that reserve space at once; where the C library would have to write zeros instead,
nothing is reserved."""

SHARED = {"lustre", "nfs", "nfs4", "cifs", "smb3", "beegfs", "gpfs", "ceph", "wekafs", "9p"}
"""Filesystems that several nodes mount."""


def filesystem(path: Path) -> str:
    """Type of the filesystem that holds `path`, as in /proc/self/mountinfo ("ext4", "lustre",
    "fuse.glusterfs", …), behind symbolic links; "" where that cannot be told. `path` need not exist
    yet."""
    path = Path(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:  # of equal ones the last is on top
            best, kind = len(point), after.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether a filesystem of this type is one that several nodes write to."""
    return kind in SHARED or kind.startswith("fuse.")


def stripe(directory: Path) -> None:
    """Ask Lustre to spread files in `directory` over a few storage targets, by `lfs` if it is
    installed. A hint: failure is logged."""
    tool = shutil.which("lfs")
    if tool is None:
        logger.info(
            "%s is on Lustre, but there is no lfs: files get the default stripes", directory
        )
        return
    command = [tool, "setstripe", "-c", "4", "-S", STRIPE_BYTES, str(directory)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if result.returncode:
        logger.warning("%s failed: %s", " ".join(command), result.stderr.strip())
