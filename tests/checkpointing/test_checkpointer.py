"""The face for a loop of one's own: whatever a state consists of comes back as it was when `save`
was called, and what is forgotten costs time, never truth."""

import copy
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkpointing import (
    Checkpointer,
    CheckpointError,
    StorageError,
    WrongModel,
    load_model,
    tensor_checkpointer,
)
from checkpointing import ranks as ranks_module
from checkpointing.format.values import from_json, to_json
from checkpointing.save import saves as saves_module
from checkpointing.state import refuse_values, take_apart
from tests.checkpointing.worlds import run_ranks, same_bits, spread


class Ensemble(nn.Module):
    """A batch norm, whose buffers change in forward, and enough bytes for a copy to take a
    while."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.bulk = nn.Parameter(torch.ones(width, 4096))

    def forward(self, x):
        return self.norm(self.layer(x)) @ self.bulk


def bits(*objects):
    """All that they hold now, as copies."""
    return copy.deepcopy([one.state_dict() for one in objects])


def same(left, right):
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, dict) and type(left) is type(right):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and (
            len(left) == len(right) and all(map(same, left, right))
        )
    return type(left) is type(right) and left == right


def make(width=16):
    torch.manual_seed(0)
    model = Ensemble(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    schedule = lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return model, optimizer, schedule


def state_of(model, optimizer, schedule):
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


@pytest.mark.parametrize("guarded", [True, False])
def test_a_save_is_one_moment_in_time(tmp_path, guarded):
    model, optimizer, schedule = make(width=3072)  # 36 MB of parameters
    mean = copy.deepcopy(model)
    state = {**state_of(model, optimizer, schedule), "mean": mean}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.load(state) is None
        if guarded:
            checkpointer.guard(optimizer)
        for step in (1, 2):
            model(torch.randn(4, 8)).square().mean().backward()
            saved = bits(model, optimizer, schedule, mean)
            checkpointer.save(step, state)
            model.norm(torch.ones(4, 3072))  # at once
            with torch.no_grad():
                for average, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model, optimizer, schedule = make(width=3072)
    mean = copy.deepcopy(model)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load({**state_of(model, optimizer, schedule), "mean": mean}) == 2
    assert same(bits(model, optimizer, schedule, mean), saved)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)  # MultiStepLR knows its steps


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_whose_state_is_more_than_tensors_goes_on_as_if_nothing_were(tmp_path, kind):
    def start():
        torch.manual_seed(0)
        model = nn.Embedding(8, 4, sparse=kind is torch.optim.SparseAdam)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}

    def train(state, steps):
        model, optimizer = state.values()

        def loss():
            optimizer.zero_grad()
            loss = (model(torch.tensor([1, 5])) - 1).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(loss)
        return bits(*state.values())

    wanted, state = train(start(), 5), start()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(state) is None
        checkpointer.guard(state["optimizer"])
        train(state, 3)
        checkpointer.save(3, state)
        assert same(train(state, 2), wanted)
    state = start()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(state) == 3
    assert same(train(state, 2), wanted)


def test_an_exception_of_all_ranks_waits_for_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_checkpointer, "LEAVE_SECONDS", 0.1)

    class Pause(SystemExit):
        of_all_ranks = True

    def work(_rank):
        slow = Checkpointer(tmp_path / "steps", max_bandwidth="4 MB")
        with suppress(Pause), slow:
            slow.save(1, {"bulk": torch.zeros(1 << 20)})
            raise Pause
        return sorted(path.name for path in (tmp_path / "steps").glob("step-*"))

    assert run_ranks(2, work, tmp_path) == [["step-00000001"]] * 2


def test_ranks_agree_on_a_save_in_one_exchange(tmp_path, monkeypatch):
    exchange, exchanges = ranks_module.exchange, []

    def counted(*arguments):
        exchanges.append(arguments)
        return exchange(*arguments)

    def work(_rank):
        monkeypatch.setattr(ranks_module, "exchange", counted)
        state = {"w": torch.zeros(4)}
        with Checkpointer(tmp_path / "steps") as checkpointer:
            checkpointer.save(1, state, wait=True)  # plans, and starts the writers
            exchanges.clear()
            assert checkpointer.save(2, state, wait=True)
            return len(exchanges)

    assert run_ranks(2, work, tmp_path) == [1, 1]


def test_such_an_optimizer_of_sharded_parameters_is_refused(tmp_path):
    def work(_rank):
        model = nn.Linear(4, 4, bias=False)
        (model.weight,) = map(nn.Parameter, spread({"w": model.weight.data}, "rows-2").values())
        state = {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}
        with (
            Checkpointer(tmp_path / "steps") as checkpointer,
            pytest.raises(ValueError, match=r"LBFGS keeps more than tensors.*or DDP"),
        ):
            checkpointer.save(1, state)
        return "refused"

    assert run_ranks(2, work, tmp_path) == ["refused"] * 2


def test_what_changes_a_guarded_parameter_besides_the_optimizer_is_never_half_saved(tmp_path):
    model, optimizer, schedule = make(width=8192)
    state = state_of(model, optimizer, schedule)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.guard(optimizer)
        checkpointer.save(1, state, wait=True)
        before = model.layer.bias.detach().clone()
        checkpointer.save(2, state)
        with torch.no_grad():
            model.layer.bias.add_(1)  # mostly while the bulk is still being copied
        checkpointer.wait_staged()
    outcomes = {outcome.step: outcome for outcome in checkpointer.outcomes()}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(state) == (1 if outcomes[2].error else 2)
    assert same_bits(model.layer.bias.detach(), before)
    assert "was changed while it was being copied" in (outcomes[2].error or "changed") or (
        not outcomes[2].error
    )


def test_buffers_become_those_of_the_first_rank_that_has_them(tmp_path):
    """As with DDP: they differ from rank to rank, and a checkpoint is of one of them. Ranks 2 and 3
    stand for another stage of a pipeline."""

    def work(rank):
        def made():
            model = nn.Sequential(*(nn.BatchNorm1d(3 + rank // 2) for _ in range(4)))
            return {("model", "stage")[rank // 2]: model}, model

        state, model = made()
        for number in range(rank + 1):
            torch.manual_seed(8 * rank + number)
            model(torch.randn(5, 3 + rank // 2))
        found = [bits(model)]
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, state, wait=True)
            found.append(bits(model))
            state, model = made()
            checkpointer.load(state)
        return [*found, bits(model)]

    ranks = run_ranks(4, work, tmp_path)
    for rank, (before, after, loaded) in enumerate(ranks):
        first = ranks[rank - rank % 2][0]
        assert same(before, first) == (rank % 2 == 0)
        assert same(after, first)
        assert same(loaded, first)


def test_an_optimizer_of_another_kind_or_other_groups_is_refused_with_nothing_changed(tmp_path):
    def made(make, seed):
        torch.manual_seed(seed)
        model = nn.ModuleList(nn.Embedding(3, 2, sparse=True) for _ in range(2))
        return {"model": model, "optimizer": make(*model.parameters())}

    kinds = torch.optim.SGD, torch.optim.LBFGS, torch.optim.SparseAdam
    sgd, lbfgs, sparse = (lambda *all, kind=kind: kind(all, lr=0.1) for kind in kinds)
    cases = (
        (
            lambda a, b: torch.optim.AdamW([{"params": a}, {"params": b, "lr": 3.0}]),
            lambda a, b: torch.optim.AdamW([{"params": b, "lr": 3.0}, {"params": a}]),
            "has 1.weight in parameter group 0, but the checkpoint has it elsewhere",
        ),
        (
            lambda *all: torch.optim.AdamW(all),
            lambda *all: torch.optim.Adam(all),
            "is Adam, but the checkpoint has the state of AdamW: use AdamW, or load into AdamW",
        ),
        (sgd, lbfgs, "is LBFGS, but the checkpoint has the state of another optimizer"),
        (lbfgs, sgd, "is SGD, but the checkpoint has the state of LBFGS"),
        (lbfgs, sparse, "is SparseAdam, but the checkpoint has the state of LBFGS"),
        (
            sparse,
            lambda a, b: torch.optim.SparseAdam([{"params": [a]}, {"params": [b]}]),
            "has 2 parameter groups, and 1 in the checkpoint",
        ),
        (
            lambda a, _: torch.optim.SparseAdam([a]),
            sparse,
            "has 2 parameters in parameter group 0, and 1 in the checkpoint",
        ),
        (
            sparse,
            lambda a, b: torch.optim.SparseAdam([b, a]),
            "has the parameters of parameter group 0 in another order",
        ),
    )
    with Checkpointer(tmp_path) as checkpointer:
        for step, (saved, asked, why) in enumerate(cases):
            checkpointer.save(step, made(saved, 0), wait=True)
            other = made(asked, 1)
            before = bits(other["model"])
            with pytest.raises(WrongModel, match=f"^optimizer {why}"):
                checkpointer.load(other)
            assert same(bits(other["model"]), before), why
    parts = take_apart(made(sgd, 0))
    refuse_values(made(sgd, 0), parts.values, parts.groups, {}, {})  # older ones name neither


@pytest.mark.parametrize("guarded", [True, False])
def test_an_optimizer_without_state_needs_no_load_before_it_is_saved(tmp_path, guarded):
    model = nn.Linear(4, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path) as checkpointer:
        if guarded:
            checkpointer.guard(state["optimizer"])
        for step in (1, 2):
            model(torch.ones(1, 4)).sum().backward()
            state["optimizer"].step()
            assert checkpointer.save(step, state, wait=True)
            assert model.weight.grad.eq(step).all()


def test_several_of_each_kind(tmp_path):
    def made():
        torch.manual_seed(1)
        maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
        ema = copy.deepcopy(maker)
        optimizers = [
            torch.optim.SGD(maker.parameters(), lr=0.1),
            torch.optim.RMSprop(judge.parameters(), lr=torch.tensor(0.2)),
        ]
        keys = ("maker", "judge", "ema", "slow", "fast", "scale")
        return dict(zip(keys, (maker, judge, ema, *optimizers, torch.zeros(2)), strict=True))

    one, other = made(), made()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(one)
        checkpointer.guard(one["slow"], one["fast"])
        one["judge"](one["maker"](torch.ones(2, 3))).sum().backward()
        one["slow"].step()
        one["fast"].step()
        one["scale"] += 3
        one["slow"].param_groups[0]["lr"] = 0.05
        one["fast"].param_groups[0]["lr"].fill_(0.5)
        checkpointer.save(7, one, wait=True, files={"note.txt": b"hello"})
        one["ema"].weight.data.zero_()
        checkpointer.save(8, one, wait=True)
        rate = other["fast"].param_groups[0]["lr"]
        assert checkpointer.load(other, step=7) == 7
        assert not same_bits(other["ema"].weight.detach(), one["ema"].weight.detach())
        assert checkpointer.load(other) == 8
    names = ("maker", "judge", "ema", "slow", "fast")
    assert same(bits(*(one[name] for name in names)), bits(*(other[name] for name in names)))
    assert same_bits(one["scale"], other["scale"])
    assert rate is other["fast"].param_groups[0]["lr"]
    assert (tmp_path / "step-00000007" / "note.txt").read_bytes() == b"hello"
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(WrongModel):
        checkpointer.load({key: value for key, value in made().items() if key != "ema"})


@pytest.mark.parametrize(
    "kind",
    [
        lambda one: lr_scheduler.OneCycleLR(one, 0.2, 10),
        lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1),
        lambda one: lr_scheduler.SequentialLR(
            one, [lr_scheduler.ConstantLR(one), lr_scheduler.MultiStepLR(one, [1])], [2]
        ),
        lambda one: torch.Generator().manual_seed(3),
    ],
)
def test_values_come_back_exactly(kind):
    one = kind(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))
    said = one.get_state() if isinstance(one, torch.Generator) else one.state_dict()
    assert same(from_json(to_json(said, "it")), said)


def test_what_is_wrong_is_told(tmp_path):
    model, optimizer, schedule = make()
    state = state_of(model, optimizer, schedule)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    class Odd:
        def state_dict(self):
            return {"call": [len]}

        def load_state_dict(self, state_dict):
            raise AssertionError

    with pytest.raises(TypeError, match="every is for recipes"):
        Checkpointer(tmp_path, every=3)
    with Checkpointer(tmp_path) as checkpointer:
        for wrong, why in [
            ({**state, "n": 3}, "n is a int: give a module"),
            ({**state, "odd": Odd()}, r"odd\['call'\]\[0\] is a builtin_function"),
            ({**state, "other": other}, "other trains a parameter that is in no module"),
            ({**state, "layer.weight": torch.zeros(1)}, "two tensors called layer.weight"),
        ]:
            with pytest.raises(ValueError, match=why):
                checkpointer.save(1, wrong)
        for wrong, why in [
            (torch.eye(2).to_sparse(), "sparse_coo: only dense"),
            (torch.ones(2, device="meta"), "on the meta device"),
            (torch.ones(1).expand(3), "share memory"),
        ]:
            odd = nn.Linear(1, 1)
            odd.register_buffer("one", wrong)
            with pytest.raises(ValueError, match=rf"odd\.one (is of torch\.)?.*{why}"):
                checkpointer.save(1, {**state, "odd": odd})
        for wrong in (3.0, 2.5, -1, "3", None):
            with pytest.raises(ValueError, match="by a whole number, from 0 on"):
                checkpointer.save(wrong, state)
        checkpointer.save(np.int64(5), state, wait=True)
    with Checkpointer(tmp_path) as checkpointer:  # load is forgotten
        with pytest.raises(CheckpointError, match="step 1 is older than step 5"):
            checkpointer.save(1, state)
        with pytest.raises(CheckpointError, match=r"step 5 is there already in .*: call load"):
            checkpointer.save(5, state)
        with pytest.raises(ValueError, match="by a whole number"):
            checkpointer.load(state, step="5")
        with pytest.raises(CheckpointError, match="no step 3; it has 5"):
            checkpointer.load(state, step=3)
        with pytest.raises(WrongModel, match="lacks more, and this state lacks nothing"):
            checkpointer.load({**state, "more": schedule})
        bulk, half = model.bulk.detach().clone(), [*model.parameters()][:2]
        with torch.no_grad():
            model.bulk.zero_()
        grouped = torch.optim.AdamW([{"params": half}, {"params": [*model.parameters()][2:]}])
        for other, why in [
            ({"model": model, "optimizer": optimizer}, "this state lacks schedule"),
            ({**state, "optimizer": grouped}, "optimizer has 2 parameter groups, and 1 in"),
        ]:
            with pytest.raises(WrongModel, match=why):
                checkpointer.load(other)
        assert not model.bulk.any()
        wide = state_of(*make(width=32))
        with pytest.raises(
            WrongModel, match=r"bulk \[32, 4096\] \(checkpoint \[16, 4096\], model-"
        ):
            checkpointer.load(wide)
        checkpointer.load(state)
        assert torch.equal(model.bulk, bulk)
        assert checkpointer.save(5, state, wait=True), "this is what is there"


def test_who_listens_in_on_the_group_does_not_learn_by_what_writers_know_each_other(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(saves_module, "os", SimpleNamespace(urandom=bytes))  # sent to all
    secret = tmp_path / "secret"
    secret.write_text("of sixteen bytes or more")
    secret.chmod(0o600)

    def known(step):
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(step, {"weight": torch.zeros(2)})
            return checkpointer._tensors._writers.secret

    monkeypatch.delenv("PERDURE_SECRET_FILE", raising=False)
    drawn = known(1)
    monkeypatch.setenv("PERDURE_SECRET_FILE", str(secret))
    assert known(2) not in (drawn, bytes(32))
    secret.chmod(0o640)
    with pytest.raises(StorageError, match="correct it, or name another in PERDURE_SECRET_FILE"):
        known(3)


class Position:
    """A data loader's, which may differ by rank."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"at": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["at"]


def test_what_differs_by_rank_is_not_taken_from_rank_0(tmp_path):
    weight = {"weight": torch.arange(12.0).reshape(6, 2)}

    def save(rank):
        state = {**spread(weight, "rows-2"), "data": Position(rank), "clock": Position((7, 8))}
        with Checkpointer(tmp_path / "run") as checkpointer:
            with pytest.raises(ValueError, match="4300 digits"):  # on both
                checkpointer.save(2, {"data": Position(10**5000 if rank else 1)})
            with pytest.raises(ValueError, match="different steps: 2, 3"):
                checkpointer.save(2 + rank, state)
            checkpointer.save(3, state, wait=True)

    def load(rank):
        empty = {"weight": torch.zeros(6, 2)}
        target = spread(empty, f"rows-{torch.distributed.get_world_size()}")
        state = {**target, "data": Position(None), "clock": Position(None)}
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.load(state)
        return state["data"].value, state["clock"].value

    assert run_ranks(2, save, tmp_path) == [None, None]
    assert run_ranks(2, load, tmp_path) == [(0, (7, 8)), (1, (7, 8))]
    (error,) = run_ranks(1, load, tmp_path)
    assert "data: its state differed among the 2 ranks" in str(error)


def test_weights_that_were_apart_are_not_loaded_into_tied_ones(tmp_path):
    """Nor does anybody call the checkpoint damaged. Tied ones fit into those that are apart."""

    def model(tied: bool) -> nn.ModuleDict:
        made = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        if tied:
            made["head"].weight = made["embed"].weight
        return made

    for tied in (False, True):
        with Checkpointer(tmp_path / str(tied)) as checkpointer:
            checkpointer.save(1, {"model": model(tied)}, wait=True)
    target = model(tied=True)
    before = bits(target)
    with Checkpointer(tmp_path / "False") as checkpointer:
        why = r"of another model: embed\.weight and head\.weight are one tensor in this one"
        with pytest.raises(WrongModel, match=why):
            checkpointer.load({"model": target})
        assert same(bits(target), before)
    names = target.state_dict()
    for tied in (None, {"head.weight": "embed.weight"}):
        with pytest.raises(WrongModel, match=r"different numbers, but the model ties the two"):
            load_model(tmp_path / "False" / "step-00000001", names, tied=tied)
        assert same(bits(target), before)
    load_model(tmp_path / "True" / "step-00000001", names)
    with Checkpointer(tmp_path / "tensors") as checkpointer:
        checkpointer.save(1, {"a": torch.zeros(2), "b": torch.ones(2)}, wait=True)
        one = torch.zeros(2)
        with pytest.raises(WrongModel, match="a and b are one tensor in this one"):
            checkpointer.load({"a": one, "b": one.detach()})
    for tied in (True, False):
        target = model(tied)
        with Checkpointer(tmp_path / "True") as checkpointer:
            assert checkpointer.load({"model": target}) == 1
            assert same_bits(target["embed"].weight, target["head"].weight)
