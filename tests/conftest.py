"""For all tests: one thread per process, as ranks have; no shared memory is left behind."""

import os

# Before torch is imported: torch.set_num_threads makes threads that do not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from checkpointing.owners import is_alive
from checkpointing.slots import SHARED_MEMORY, forget


@pytest.fixture(autouse=True)
def no_memory_left():
    """Runs that a test kills leave their slots in shared memory, for a restart: not here."""
    before = set(SHARED_MEMORY.glob("perdure-*"))
    yield
    for folder in set(SHARED_MEMORY.glob("perdure-*")) - before:
        if is_alive(folder.name) is False:
            forget(folder)
