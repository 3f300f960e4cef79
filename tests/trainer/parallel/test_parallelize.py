"""What a single rank makes of a model: where its tensors are, and how they get their values."""

import copy
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor

from elastic import World
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak
from tests.distributed.test_expert_parallel import MOE
from trainer.models import init_parameter
from trainer.parallel import parallelize as parallelizing
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import build_mesh, is_sharded_by_fsdp
from trainer.parallel.parallelize import parallelize
from trainer.tasks.model_blocks import repeated_blocks
from trainer.tasks.task import bare_model

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def world():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(
        rank=0, local_rank=0, world_size=1, local_world_size=1, nodes=1, round=0,
        generation=0, cause=None, device=CPU,
    )  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("overrides", "by_fsdp"),
    [
        (("strategy.sharding=FULL_SHARD",), False),
        (("strategy.sharding=SHARD_GRAD_OP", "strategy.compile=true"), False),
        (("strategy.sharding=FULL_SHARD", "strategy.offload=cpu"), True),
        (("run.determinism=exact",), True),
    ],
)
def test_a_single_rank_shards_only_what_needs_it(world, recipe, overrides, by_fsdp):
    alone = recipe(*overrides)
    model, blocks, _ = bare_model(alone)
    names = list(dict(model.named_parameters()))
    threads = torch.get_num_threads()
    made = parallelize(
        model, blocks, build_mesh(alone, world), alone, CPU, lambda _name, shape: torch.ones(shape)
    )
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    assert list(made.parameters) == names
    assert bool(fsdp_units(made.module)) == by_fsdp
    assert all(isinstance(p, DTensor) == by_fsdp for p in made.parameters.values())


@pytest.mark.parametrize(
    ("world_size", "overrides", "by_fsdp"),
    [
        (2, (), False),  # each stage is one rank's
        (2, ("strategy.pp_schedule=zero_bubble", "strategy.zero=2"), False),
        (4, (), True),
        (4, ("strategy.cp=2",), True),
        (4, ("strategy.tp=2",), True),
        (2, ("precision.dtype=bf16",), True),
        (2, ("run.determinism=exact",), True),
        (2, ("strategy.offload=cpu",), True),
    ],
)
def test_a_stage_is_sharded_where_that_is_needed(recipe, world_size, overrides, by_fsdp):
    pipeline = recipe("strategy.pp=2", *overrides)
    assert is_sharded_by_fsdp(pipeline, world_size) == by_fsdp


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["strategy.sharding=FULL_SHARD"]),
        (2, ["strategy.name=ddp"]),
        (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
    ],
)
def test_buffers_of_replicas_are_those_of_the_first(recipe, tmp_path, ranks, overrides):
    """They would differ: each normalises over its own samples."""
    own = recipe("model.architecture=null", "model.factory=a:model", *overrides)

    def work(rank):
        world = World(
            rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, nodes=1, round=0,
            generation=0, cause=None, device=CPU,
        )  # fmt: skip
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        alone = copy.deepcopy(model)
        made = parallelize(model, [], build_mesh(own, world), own, CPU, None)
        for step in range(2):
            torch.manual_seed(8 * step + rank)
            inputs = [{"input": torch.randn(5, 3)} for _ in range(2)]
            for forward in made.run(inputs, train=True):
                forward.root = made.module(**inputs[forward.number]).sum()
            for batch in inputs:
                alone(**batch)
        return made.buffers(), dict(alone.named_buffers())

    found = run_ranks(ranks, work, tmp_path)
    first = found[0][1]
    assert len({str(alone) for _, alone in found}) == ranks
    for buffers, _ in found:
        assert buffers.keys() == first.keys()
        assert all(torch.equal(buffers[name], first[name]) for name in first)


class Residual(nn.Module):
    """Adds a layer to what it gets."""

    def __init__(self, norm=False):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Tanh()

    def forward(self, x):
        return x + self.norm(self.layer(x))


def shared():
    """One block under three names."""
    block = Residual()
    return nn.Sequential(nn.Linear(3, 4), block, block, block)


def tied():
    """Of two blocks a weight is one."""
    model = nn.Sequential(nn.Linear(3, 4), *(Residual() for _ in range(3)))
    model[1].layer.weight = model[3].layer.weight
    return model


def transposed():
    model = nn.Sequential(nn.Linear(3, 4), *(Residual() for _ in range(2)))
    model[1].layer.weight = nn.Parameter(torch.randn(4, 4).t())
    return model


def counting():
    return nn.Sequential(nn.Linear(3, 4), *(Residual(norm=True) for _ in range(2)))


FULL = "strategy.activation_checkpointing=full"
SELECTIVE = "strategy.activation_checkpointing=selective"


@pytest.mark.parametrize(
    ("make", "blocks", "units"),
    [(shared, 1, 1), (tied, 3, 1), (transposed, 2, 2), (counting, 2, 2)],
)
def test_odd_blocks_in_a_sequential_learn_what_one_process_does(
    recipe, tmp_path, make, blocks, units
):
    own = ["model.architecture=null", "model.factory=a:model"]
    strategies = [
        recipe(*own, *strategy)
        for strategy in (
            ["strategy.name=ddp", FULL],
            ["strategy.sharding=OPTIMIZER_STATE"],
            ["strategy.sharding=FULL_SHARD"],
            ["strategy.sharding=FULL_SHARD", FULL],
            ["strategy.sharding=SHARD_GRAD_OP", SELECTIVE],
        )
    ]
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(3, 4, 5, 3)  # (steps, micro-batches, batch, size)

    def work(rank):
        world = World(
            rank=rank, local_rank=rank, world_size=2, local_world_size=2, nodes=1, round=0,
            generation=0, cause=None, device=CPU,
        )  # fmt: skip
        found = []
        for one in strategies:
            mine = copy.deepcopy(model)
            mesh = build_mesh(one, world)
            made = parallelize(mine, repeated_blocks(mine), mesh, one, CPU, None)
            optimizer = torch.optim.SGD(made.optimized.values(), lr=0.1)
            for step in inputs:
                batches = [{"input": batch} for batch in step[2 * rank :][:2]]
                for forward in made.run(batches, train=True):
                    forward.root = made.module(**batches[forward.number]).square().mean()
                made.collect_gradients()
                optimizer.step()
                made.publish_weights()
                made.zero_gradients()
            wrapped = {module for module in mine.modules() if isinstance(module, CheckpointWrapper)}
            whole = {
                name: one.full_tensor() if isinstance(one, DTensor) else one
                for name, one in made.parameters.items()
            }
            found.append((len(wrapped), len(fsdp_units(mine)), whole, made.buffers()))
        return found

    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    seen = []  # by the first rank, whose buffers count
    for step in inputs:
        before = [buffer.clone() for buffer in alone.buffers()]
        for number, batch in enumerate(step):
            alone(batch).square().mean().backward()
            if number == 1:
                seen = [buffer.clone() for buffer in alone.buffers()]
        assert not before or not torch.equal(before[0], seen[0])
        for buffer, value in zip(alone.buffers(), seen, strict=True):
            buffer.data.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(2, work, tmp_path)
    for found in results:
        assert [wrapped for wrapped, *_ in found] == [blocks, 0, 0, blocks, blocks]
        assert [count for _, count, *_ in found] == [0, 0, *[units + 1] * 3]
        for _, _, whole, buffers in found:
            assert list(whole) == [name for name, _ in alone.named_parameters()]
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(whole[name].detach(), parameter.detach())
            for name, buffer in alone.named_buffers():
                torch.testing.assert_close(buffers[name], buffer)


def test_offload_to_the_host_leaves_buffers_on_the_device(world, recipe):
    """Those of KGAT hold the attention that its forward pass computes with. The meta device stands
    for a GPU: what is there is not on the host."""
    offloading = recipe("strategy.offload=cpu")
    with META:
        model = nn.Linear(8, 8)
        model.register_buffer("attention", torch.empty(5))
    mesh = build_mesh(offloading, world)
    made = parallelize(model, [], mesh, offloading, META, lambda _name, shape: torch.ones(shape))
    assert {tensor.device for tensor in made.parameters.values()} == {CPU}
    assert made.buffers()["attention"].device == META


@pytest.mark.parametrize("at_once", [True, False])
def test_weights_are_drawn_at_once_and_are_the_same(world, recipe, monkeypatch, at_once):
    """Or one after the other, where memory is given for no two of them."""
    monkeypatch.setattr(parallelizing, "DRAWN_BYTES", 1 << 30 if at_once else 1)
    drawing = recipe("strategy.name=ddp")
    model, blocks, _ = bare_model(drawing)
    architecture = model.model.architecture
    pair, now = Barrier(2), set()

    def fill(name, shape):
        now.add(name)
        if at_once and name.endswith(("q_proj.weight", "o_proj.weight")):
            pair.wait(timeout=30)  # two that are drawn one after the other never meet here
        assert at_once or now == {name}
        now.remove(name)
        return init_parameter(name, shape, architecture, 7)

    made = parallelize(model, blocks, build_mesh(drawing, world), drawing, CPU, fill, cores=2)
    made.draw_weights()
    for name, tensor in made.parameters.items():
        assert tensor.equal(init_parameter(name, tuple(tensor.shape), architecture, 7)), name


@pytest.mark.parametrize("how", [pytest.param("full", marks=soak), "selective"])
def test_recomputed_blocks_with_experts_are_compiled(world, recipe, monkeypatch, how):
    """Experts are outside of what is compiled, where torch would compile nothing of a block."""
    graphs, compile_ = [], nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", lambda part: compile_(part, backend=backend))
    losses = []
    for strategy in ((), (f"strategy.activation_checkpointing={how}", "strategy.compile=true")):
        given = recipe(*MOE, *strategy)
        model, blocks, _ = bare_model(given)
        architecture = model.model.architecture
        made = parallelize(
            model, blocks, build_mesh(given, world), given, CPU,
            lambda name, shape, known=architecture: init_parameter(name, shape, known, 0),
        )  # fmt: skip
        made.draw_weights()
        tokens = torch.arange(64).view(2, 32)
        loss = made.module(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        norms = [parameter.grad.norm() for parameter in made.parameters.values()]
        losses.append(torch.stack([loss.detach(), *norms]))
        assert bool(graphs) == bool(strategy)
    torch.testing.assert_close(*losses)
