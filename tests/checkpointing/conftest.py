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
