"""Programs of other libraries are killed on two ranks, and go on on one and on three as if nothing
had been."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.checkpointing.adapters import loops
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import ROOT, soak

TOLERANCE = 1e-6
"""Gradients are summed in another order: 2e-8 to 1e-7 was seen."""
FORKED = {
    "accelerate": ["accelerate", "datasets"],
    "lightning": ["checkpointing.adapters.lightning"],
    "hugging_face": ["transformers.trainer", "transformers.data.data_collator"],
}
"""Library → what its ranks have imported when they are forked: it takes seconds."""


def forked(name, folder, ranks, at=0):
    """Weights of each rank at the end; None of one that was killed."""

    def work(rank):
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "none", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        }  # fmt: skip
        os.chdir(folder)
        return loops.LIBRARIES[name](str(folder / "run"), at)

    for module in FORKED[name]:
        importlib.import_module(module)
    folder.mkdir(exist_ok=True)
    return run_ranks(ranks, work, folder / "ranks")


def by_torchrun(name, folder, ranks, at=0):
    """As `forked`; weights of the first rank alone."""
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", f"{ranks}"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(loops.__file__, name, folder / "run", f"{at}"),
    ]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode == 0) == (at == 0), done.stderr
    assert not at or "SIGKILL" in done.stderr
    return [None if at else torch.load(folder / "weights.pt")]


@pytest.mark.timeout(1500)  # torchrun starts the ranks five times, and each imports its library
@pytest.mark.parametrize(
    ("name", "start"),
    [
        *((name, forked) for name in FORKED),
        *(pytest.param(name, by_torchrun, marks=soak) for name in loops.LIBRARIES),
    ],
)
def test_a_program_that_is_killed_on_two_ranks_goes_on_on_one_and_on_three(tmp_path, name, start):
    (want,) = start(name, tmp_path / "whole", 1)
    assert set(start(name, tmp_path / "2", 2, loops.DIE)) == {None}
    for ranks in (3, 2, 1) if start is by_torchrun else (3, 1):
        shutil.copytree(tmp_path / "2", tmp_path / f"on-{ranks}")
        for found in start(name, tmp_path / f"on-{ranks}", ranks):
            assert torch.allclose(found, want, rtol=0, atol=TOLERANCE), (found - want).abs().max()
        assert (tmp_path / f"on-{ranks}" / "begins").read_text() in ("4", "8")
        steps = sorted(path.name for path in (tmp_path / f"on-{ranks}" / "run").glob("step-*"))
        assert steps[-2:] == ["step-00000008", "step-00000012"]
