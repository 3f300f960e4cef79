"""A rank that has more to do than others is not called slow; one that takes longer is."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from elastic.group.batch_plan import plan_batch
from tests.checkpointing.worlds import run_ranks
from trainer.parallel.mesh import PIPELINE, REPLICATE, Mesh
from trainer.run.speed import RunSpeedRecorder
from trainer.run.state import RunProgress


def slow_ranks(rank: int, slower: dict[int, float], pp: int = 1) -> set[int]:
    """Ranks that are called slow after some log intervals in which a sequence takes as long on all,
    or `slower` times that. With two stages the second has seven times as much to compute."""
    plan, (share, stage) = plan_batch(5, 2, 3), divmod(rank, pp)
    (micro,) = plan.micro_batches(share, 0)
    told: list[str] = []
    ranks = init_device_mesh("cpu", (2, pp), mesh_dim_names=(REPLICATE, PIPELINE))
    run = SimpleNamespace(
        plan=plan, progress=RunProgress(), mesh=Mesh(ranks, share, 2, dist.group.WORLD, 2),
        world=SimpleNamespace(device=torch.device("cpu"), rank=rank, world_size=2 * pp),
        log=SimpleNamespace(event=lambda _step, _event, what: told.append(what)),
        model=SimpleNamespace(pipeline=None), micro_batches=[micro],
    )  # fmt: skip
    speed = RunSpeedRecorder(run)
    compute = len(micro.positions) * slower.get(rank, 1.0) * (1 + 6 * stage)
    speed._window.results = [SimpleNamespace(gradients=SimpleNamespace(compute=compute))]
    for _ in range(4):
        speed._name_stragglers(*speed._by_rank())
    return {int(sentence.split()[1]) for sentence in told}


def test_uneven_shares_name_nobody_and_a_straggler_is_named(tmp_path):
    for slower, named in (({}, set()), ({1: 4.0}, {1}), ({0: 4.0}, {0})):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        ranks = run_ranks(2, lambda rank, slower=slower: slow_ranks(rank, slower), folder)
        assert ranks == [named, named]


def test_ranks_of_a_stage_are_compared_with_each_other(tmp_path):
    ranks = run_ranks(4, lambda rank: slow_ranks(rank, {2: 4.0}, pp=2), tmp_path)
    assert ranks == [{2}] * 4
