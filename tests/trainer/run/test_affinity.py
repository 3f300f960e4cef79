"""Slurm and cpusets give a process some of the machine's cores: all that is sized by cores counts
those alone."""

import os

import pytest

from checkpointing.save.blocks import default_writers
from trainer.cli.main import _parser
from trainer.run.preflight import default_ranks


@pytest.fixture
def one_core():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.skipif((os.cpu_count() or 1) == 1, reason="takes a machine of two cores")
def test_one_core_of_several_counts_as_one(one_core):
    assert default_ranks("cpu") == 1
    assert default_writers("ext4") == 1
    prepare = _parser().parse_args(["data", "prepare", "corpus", "--out", "data"])
    assert prepare.workers == 1
