"""A rank that has more to do than others is not called slow; one that takes longer is."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from elastic.group.batch_plan import plan_batch
from tests.checkpointing.worlds import run_ranks
from trainer.parallel.mesh import Mesh
from trainer.run.speed import Speed
from trainer.run.state import Progress


def slow_ranks(rank: int, slower: dict[int, float]) -> set[int]:
    """Ranks that are called slow after some log intervals in which a sequence takes as long on all,
    or `slower` times that."""
    plan = plan_batch(5, 2, 3)
    (micro,) = plan.micro_batches(rank, 0)
    told: list[str] = []
    run = SimpleNamespace(
        recipe=SimpleNamespace(strategy=SimpleNamespace(pp=1)),
        plan=plan, progress=Progress(), mesh=Mesh(None, rank, 2, dist.group.WORLD, 2),
        world=SimpleNamespace(device=torch.device("cpu"), rank=rank, world_size=2),
        log=SimpleNamespace(event=lambda _step, _event, what: told.append(what)),
    )  # fmt: skip
    speed = Speed(run)
    speed._window.computes = [len(micro.positions) * slower.get(rank, 1.0)]
    for _ in range(4):
        speed._name_stragglers()
    return {int(sentence.split()[1]) for sentence in told}


def test_uneven_shares_name_nobody_and_a_straggler_is_named(tmp_path):
    for slower, named in (({}, set()), ({1: 4.0}, {1}), ({0: 4.0}, {0})):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        ranks = run_ranks(2, lambda rank, slower=slower: slow_ranks(rank, slower), folder)
        assert ranks == [named, named]
