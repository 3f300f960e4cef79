"""For all tests of checkpoints: their writers."""

import pytest

from checkpointing.save import link
from tests.checkpointing import forked_writer


@pytest.fixture(autouse=True)
def forked_writers(monkeypatch):
    """Writers of ranks that are forked here are forked, too, as those of a `Job` of
    tests/distributed are. Those of ranks that an agent has started and those in which faults are
    planted are new interpreters."""
    monkeypatch.setattr(link, "launch", forked_writer.launch)
