"""Optimizers by name and by factory: the curves of torch.optim in one process, under every strategy
and across changes of it."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpointing import newest_checkpoint, read_state
from tests.distributed.jobs import ROOT, SOAK, losses, records, soak
from tests.distributed.test_expert_parallel import MOE
from tests.distributed.test_resume import assert_same
from trainer.optim import muon
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer, learning_rate
from trainer.recipe import MuonSection, OptimizerSection, RecipeError, load_recipe
from trainer.run.preflight import check_launch
from trainer.tasks.task import build_task

OWN = "tests.distributed.own_optimizers"
STEPS = 12 if SOAK else 6
COMMON = (
    *(f"run.steps={STEPS}", "optimizer.lr=5e-4", "optimizer.clip_norm=0"),
    *("schedule.name=constant", "schedule.warmup_steps=2"),
)
MUON = (*COMMON, "optimizer.name=muon")
SP = ("strategy.tp=2", "strategy.sequence_parallel=true")
# Largest seen 5e-6: sums of gradients are rounded in another order, and Newton-Schulz in bfloat16
# enlarges that. Of the others 9e-8.
TOLERANCE = 1e-5


def reference(workspace, overrides, build):
    """Losses by step of a loop without any of the engine's optimizers, in this process."""
    data = f"data.sources.0.path={workspace / 'data'}"
    recipe = load_recipe(workspace / "recipe.yaml", [*COMMON, data, *overrides])
    size, part = recipe.batch.global_batch, recipe.micro_batch
    task = build_task(recipe)
    model = task.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(task.fill(name, tuple(tensor.shape)))
    optimizers = build(dict(model.named_parameters()), recipe)
    found = {}
    for step in range(1, recipe.run.steps + 1):
        total = 0.0
        for start in range((step - 1) * size, step * size, part):
            batch = task.stream.fetch(list(range(start, start + part)))
            loss = model(**batch) * (part / size)
            loss.backward()
            total += loss.item()
        lr = learning_rate(step, recipe.run.steps, recipe.optimizer.lr, recipe.schedule)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        found[step] = total
    return found


def torchs_muon(parameters, recipe):
    options = recipe.optimizer
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and "embed" not in name]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    embeddings = [p for name, p in parameters.items() if "embed" in name]
    assert len(matrices) + len(vectors) + len(embeddings) == len(parameters)
    decay = options.weight_decay
    return [
        torch.optim.Muon(
            matrices, lr=options.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": decay}, {"params": vectors, "weight_decay": 0}],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        ),
    ]


@pytest.fixture(scope="session")
def single(workspace):
    return reference(workspace, ["optimizer.name=muon"], torchs_muon)


def worst(curve, wanted):
    """Largest relative difference of two curves."""
    assert curve.keys() == wanted.keys()
    return max(abs(curve[step] - wanted[step]) / wanted[step] for step in wanted)


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        pytest.param("one", 1, [], marks=soak),
        ("full-2", 2, []),
        pytest.param("ddp-2", 2, ["strategy.name=ddp"], marks=soak),
        pytest.param("zero1-3", 3, ["strategy.zero=1"], marks=soak),
        pytest.param("zero2-4", 4, ["strategy.zero=2"], marks=soak),
        pytest.param("full-3", 3, [], marks=soak),
        pytest.param("full-4", 4, [], marks=soak),
        pytest.param("cpu-2", 2, ["strategy.offload=cpu"], marks=soak),
        pytest.param(
            *("hybrid-2x2", 4), ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"],
            marks=soak,
        ),
        *(
            pytest.param(*case, marks=soak)
            for case in (
                ("tp2", 2, SP),
                ("tp2-fsdp2", 4, SP),
                ("tp2-fsdp3", 6, SP),
                ("tp2-hsdp", 8, [*SP, "strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
                ("pp2", 2, ["strategy.pp=2"]),
                ("pp2-tp2-fsdp2", 8, ["strategy.pp=2", *SP]),
                ("cp2", 2, ["strategy.cp=2"]),
                ("cp2-tp2", 4, ["strategy.cp=2", *SP]),
            )
        ),
    ],
)  # fmt: skip
def test_muon_follows_torchs_in_one_process(workspace, train, single, name, ranks, overrides):
    train(ranks, f"run.dir=muon-{name}", *MUON, *overrides)
    assert worst(losses(workspace, f"muon-{name}"), single) <= TOLERANCE


@soak
def test_muon_beside_experts(workspace, train):
    """AdamW updates those, which are stacks of matrices."""
    train(1, "run.dir=muon-moe", *MUON, *MOE)
    train(4, "run.dir=muon-ep2", *MUON, *MOE, "strategy.ep=2")
    curves = losses(workspace, "muon-ep2"), losses(workspace, "muon-moe")
    assert worst(*curves) <= TOLERANCE


@soak
def test_muon_goes_on_in_another_world_and_strategy(workspace, train, single):
    moved = ("run.dir=muon-moved", *MUON)
    train(2, *moved, "run.steps=4")
    train(3, *moved, "run.steps=8", "strategy.zero=1")
    train(1, *moved)
    assert worst(losses(workspace, "muon-moved"), single) <= TOLERANCE


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_an_update_of_muon_has_the_bits_of_torchs(monkeypatch, nesterov, adjust):
    """Where both multiply in bfloat16; gradients come doubled, and are halved by the factor."""
    monkeypatch.setattr(muon, "_product_dtype", lambda device: torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (7, 7)]
    ours = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    settings = MuonSection(nesterov=nesterov, adjust_lr=adjust, momentum=0.9, ns_steps=4)
    options = OptimizerSection(name="muon", lr=0.02, weight_decay=0.3, muon=settings)
    optimizer = build_optimizer({f"{n}": weight for n, weight in enumerate(ours)}, options)
    torchs = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=nesterov, ns_steps=4,
        adjust_lr_fn=adjust,
    )  # fmt: skip
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(one.shape, generator=draw)
            one.grad = other.grad * 2
        update(optimizer, [optimizer.param_groups], 0.5)
        torchs.step()
    assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))


def test_a_single_rank_multiplies_what_is_offloaded_on_its_device(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, seen = DeviceMesh("meta", [0], mesh_dim_names=("dp_shard",)), []

    def orthogonal(matrix, group):
        seen.append(matrix.device.type)
        return torch.ones(matrix.shape, dtype=torch.bfloat16)

    monkeypatch.setattr(muon, "orthogonal", orthogonal)
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)  # where torch 2.15 counts devices
    like = distribute_tensor(torch.empty(3, 4, device="meta"), mesh, [Shard(0)])
    weight = nn.Parameter(DTensor(torch.zeros(3, 4), like._spec, requires_grad=False))
    weight.grad = DTensor(torch.ones(3, 4), like._spec, requires_grad=False)
    optimizer = build_optimizer({"matrix": weight}, OptimizerSection(name="muon", lr=0.1))
    update(optimizer, [optimizer.param_groups], 1.0)
    dist.destroy_process_group()
    assert seen == ["meta"]
    assert weight.to_local().device.type == "cpu"
    assert (weight.to_local() < 0).all()


@soak
def test_exact_muon_has_the_same_bits_at_every_data_parallel_size(workspace, train):
    exact = (*MUON, "run.determinism=exact", "optimizer.clip_norm=0.5")
    for ranks in (2, 4):
        train(ranks, f"run.dir=exact-tp-{ranks}", *exact, *SP)
    assert_same(workspace, "exact-tp-2", "exact-tp-4")


@soak
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["strategy.zero=2"]),
        (3, []),
        (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
        (4, ["strategy.name=ddp"]),
    ],
)
def test_exact_muon_has_the_same_bits_on_any_number_of_ranks(workspace, train, ranks, overrides):
    exact = (*MUON, "run.determinism=exact", "optimizer.clip_norm=0.5")
    if not losses(workspace, "exact"):
        train(1, "run.dir=exact", *exact)
    run = f"exact-{ranks}{len(overrides)}{overrides and overrides[0][-3:]}"
    train(ranks, f"run.dir={run}", *exact, *overrides)
    assert_same(workspace, "exact", run)


GIVEN = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "AdamW": {"amsgrad": True},
}
DENSE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
)


@soak
@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_of_torch(workspace, train, name):
    """Bitwise that of plain torch on one rank; saved sharded on two, and gone on with on three that
    shard nothing but its state, then on one that shards nothing."""
    kind, given = getattr(torch.optim, name), GIVEN.get(name, {})
    own = (
        f"optimizer.factory=torch.optim:{name}",
        f"optimizer.factory_options={{{', '.join(f'{k}: {v}' for k, v in given.items())}}}",
    )

    def plain(parameters, recipe):
        matrices = [p for p in parameters.values() if p.dim() >= 2]
        vectors = [p for p in parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "lr": recipe.optimizer.lr, "weight_decay": 0.1},
            {"params": vectors, "lr": recipe.optimizer.lr, "weight_decay": 0.0},
        ]
        return [kind(groups, **given)]

    wanted = reference(workspace, own, plain)
    train(1, f"run.dir=one-{name}", *COMMON, *own)
    assert losses(workspace, f"one-{name}") == wanted
    moved = (f"run.dir=moved-{name}", *COMMON, *own)
    train(2, *moved, "run.steps=4")
    train(3, *moved, "run.steps=8", "strategy.zero=1")
    train(1, *moved)
    assert worst(losses(workspace, f"moved-{name}"), wanted) <= TOLERANCE


@soak
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
        (2, SP),
        (4, SP),
        (2, ["strategy.pp=2"]),
        (2, ["strategy.cp=2"]),
        (2, ["strategy.offload=cpu"]),
    ],
)
def test_factors_of_sharded_matrices_in_every_layout(workspace, train, ranks, overrides):
    """torch's Adafactor, which takes sums over rows and columns."""
    own = (*COMMON, "optimizer.factory=torch.optim:Adafactor", "optimizer.lr=1e-2")
    if not losses(workspace, "factors"):
        train(1, "run.dir=factors", *own)
    run = f"factors-{ranks}-{overrides[0][-4:]}"
    train(ranks, f"run.dir={run}", *own, *overrides)
    assert worst(losses(workspace, run), losses(workspace, "factors")) <= TOLERANCE


def test_replicas_draw_alike_and_what_they_count_comes_back(workspace, train):
    """What a step draws is a function of the step, on any number of ranks that hold whole
    weights."""
    own = (*COMMON, f"optimizer.factory={OWN}:Wandering")
    train(1, "run.dir=wandering-1", *own, "strategy.name=ddp")
    train(2, "run.dir=wandering-2", *own, "strategy.name=ddp", "run.steps=4")
    train(2, "run.dir=wandering-2", *own, "strategy.name=ddp")
    if SOAK:
        train(2, "run.dir=wandering-sharded", *own)
    curves = losses(workspace, "wandering-2"), losses(workspace, "wandering-1")
    assert worst(*curves) <= TOLERANCE


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"optimizer.factory={OWN}:Counting",
            "Counting changes steps of the optimizer itself",
        ),
        (
            f"optimizer.factory={OWN}:Distinct",
            "unique.* use strategy.name=ddp, which does not shard the parameters",
        ),
        ("optimizer.factory=torch.optim:LBFGS", "LBFGS computes losses of its own"),
        ("optimizer.factory=torch.optim:SparseAdam", "SparseAdam .* dense gradients"),
        ("optimizer.factory=torch.optim:Sgd", r"has no Sgd; did you mean SGD\?"),
        ("optimizer.factory=torch.nn:Linear", "returned Linear, not a torch.optim.Optimizer"),
        ("optimizer.groups=[{match: '*.norms.*'}]", r"groups.0.match: no parameter is called"),
        ("optimizer.muon={momentum: 0.9}", "only for optimizer.name: muon"),
    ],
)
def test_what_cannot_train_is_refused_before_anything_starts(workspace, override, message):
    data = f"data.sources.0.path={workspace / 'data'}"
    with pytest.raises(RecipeError, match=message):
        check_launch(load_recipe(workspace / "recipe.yaml", [data, override]), 2, 2)


def test_an_optimizer_and_a_schedule_in_a_file_of_the_users(workspace, train):
    """The file that the documentation shows, with groups; killed runs resume at the same loss."""
    shutil.copy(ROOT / "examples/own_optimizer.py", workspace)
    own = (
        *(f"run.steps={STEPS}", "optimizer.factory=own_optimizer:lion", "optimizer.lr=1e-3"),
        *("schedule={factory: own_optimizer:inverse_root, factory_options: {warmup: 4}}",),
        "optimizer.groups=[{match: '*norm*', lr_scale: 2}, {match: '*embed*', weight_decay: 0}]",
    )
    train(1, "run.dir=lion", *own)
    rates = [record["lr"] for record in records(workspace, "lion") if "lr" in record]
    assert rates == [1e-3 * min(step / 4, (4 / step) ** 0.5) for step in range(1, STEPS + 1)]
    curve = losses(workspace, "lion")
    assert curve[STEPS] < curve[1] - 0.2
    train(2, "run.dir=lion-moved", *own, "run.steps=4")
    train(1, "run.dir=lion-moved", *own)
    assert worst(losses(workspace, "lion-moved"), curve) <= TOLERANCE
    groups = read_state(newest_checkpoint(workspace / "lion/checkpoints"))["parameter_groups"]
    assert groups["model.norm.weight"] == {"lr": 2 * rates[-1], "weight_decay": 0}
    assert groups["model.embed_tokens.weight"] == {"lr": rates[-1], "weight_decay": 0}
