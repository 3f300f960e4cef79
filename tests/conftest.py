"""For all tests: one thread per process, as ranks have; no shared memory is left behind."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

# Before torch is imported: torch.set_num_threads makes threads that do not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"
# Hundreds of processes start here: each would compile our packages anew if none may keep them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import settings

from checkpointing.storage.folders import SHARED_MEMORY, forget, hold
from tests.forked_workers import pytest_xdist_setupnodes
from tests.s3 import server, store

__all__ = ["pytest_xdist_setupnodes", "server", "store"]

sys.dont_write_bytecode = False

# A busy machine is no failure. Examples are drawn anew in each run.
EXAMPLES = 200 if os.environ.get("SOAK") else 40
settings.register_profile("perdure", deadline=None, max_examples=EXAMPLES)
settings.load_profile("perdure")

_before: set[Path] = set()


def pytest_sessionstart() -> None:
    _before.update(SHARED_MEMORY.glob("perdure-*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that may take longer than the others come first, and then those of whole jobs: nobody
    waits for them in the end."""
    jobs = str(Path(__file__).parent / "distributed") + os.sep
    items.sort(
        key=lambda item: (
            not item.get_closest_marker("timeout"), not str(item.path).startswith(jobs)
        )
    )  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported meanwhile is garbage, and to look at all of it takes seconds: not
    now, and not in each later collection."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Runs that tests kill leave their slots in memory, for a restart: not after the last test."""
    if hasattr(session.config, "workerinput"):  # other workers may still have tests to run
        return
    for path in set(SHARED_MEMORY.glob("perdure-*")) - _before:
        if folder := hold(path):
            forget(folder)
