"""Any world and strategy writes the same bytes, and any reads what any other wrote."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from checkpointing import CheckpointOptions, TensorCheckpointer, load_model
from checkpointing.format.layout import BLOCK_BYTES, MODEL, OPTIMIZER
from checkpointing.storage.steps import open_step
from tests.checkpointing.stored import digests
from tests.checkpointing.worlds import (
    STRATEGIES,
    local,
    run_ranks,
    same_bits,
    save_now,
    spread,
    whole_state,
)
from tests.distributed.jobs import soak

OPTIONS = CheckpointOptions(max_shard_size=700)
WORLDS = {
    "replicated-1": ("replicated", 1),
    "replicated-2": ("replicated", 2),
    "replicated-3": ("replicated", 3),
    **{
        name: (name, int(torch.Size(shape).numel()))
        for name, (shape, _) in STRATEGIES.items()
        if shape
    },
}
REPEATS = {"replicated-1", "replicated-2", "rows-1", "rows-2", "rows-3", "columns-2"}
"""Parts of others."""


def save(folder: Path, strategy: str, world_size: int) -> Path:
    def work(rank):
        model, optimizer = (spread(part, strategy) for part in whole_state())
        with TensorCheckpointer(folder / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            state, files = {"step": 7}, {"config.json": b"{}\n"}
            return save_now(
                checkpointer, 7, model=model, optimizer=optimizer, state=state, files=files
            )

    paths = run_ranks(world_size, work, folder / "ranks")
    assert paths == [folder / "run" / "step-00000007"] * world_size
    return paths[0]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The state as one process saves it."""
    return save(tmp_path_factory.mktemp("one"), "replicated", 1)


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[soak] * (world in REPEATS)) for world in WORLDS]
)
def test_every_world_writes_the_same_bytes_and_reads_those_of_one_process(world, saved, tmp_path):
    strategy, world_size = WORLDS[world]
    ours = save(tmp_path, strategy, world_size)
    assert digests(ours) == digests(saved)
    assert len(list(ours.glob("*.safetensors"))) > 1

    def work(rank):
        whole = whole_state()
        wanted = [spread(part, strategy) for part in whole]
        targets = [
            {name: torch.zeros_like(tensor) for name, tensor in part.items()} for part in wanted
        ]
        with TensorCheckpointer(saved.parent, OPTIONS, dist.group.WORLD) as checkpointer:
            state = checkpointer.load(model=targets[0], optimizer=targets[1])
        assert state == {"step": 7}
        for target, want in zip(targets, wanted, strict=True):
            for name in want:
                assert same_bits(local(target[name]), local(want[name])), name
        # Without the group, without checks: the same.
        again = {name: torch.zeros_like(tensor) for name, tensor in wanted[0].items()}
        load_model(saved, again, verify=False)
        assert all(same_bits(local(again[name]), local(wanted[0][name])) for name in again)
        return "good"

    assert run_ranks(world_size, work, tmp_path / "ranks") == ["good"] * world_size


def test_meshes_side_by_side_and_tensors_that_only_some_ranks_hold(saved, tmp_path):
    """Tensor parallelism under DDP: each rank knows only its own submesh. Pipeline stages: each
    rank knows only its own tensors."""

    def work(rank):
        model, optimizer = whole_state()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns = {
            name: distribute_tensor(
                tensor, mesh["tp"], [Shard(tensor.ndim - 1)], src_data_rank=None
            )
            if tensor.ndim
            else tensor
            for name, tensor in model.items()
        }
        stage = [name for name in optimizer if (rank >= 2) == ("norm" in name)]
        mine = {name: optimizer[name] for name in stage}
        with TensorCheckpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            path = save_now(
                checkpointer, 7, model=columns, optimizer=mine, state={"step": 7}, files={}
            )
            targets = {name: torch.zeros_like(tensor) for name, tensor in columns.items()}
            stage_targets = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
            checkpointer.load(model=targets, optimizer=stage_targets)
        assert all(same_bits(local(targets[name]), local(columns[name])) for name in targets)
        assert all(same_bits(stage_targets[name], mine[name]) for name in mine)
        return path

    (path, *_) = run_ranks(4, work, tmp_path / "ranks")
    ours, theirs = digests(path), digests(saved)
    names = [name for name in ours if name.startswith("model")]
    assert len(names) > 1
    assert [ours[name] for name in names] == [theirs[name] for name in names]


def test_tensors_larger_than_a_block_are_cut_between_replicas(tmp_path):
    """Each of two replicas writes about half of 40 MB, and every block has its checksum."""
    torch.manual_seed(0)
    model = {"small": torch.randn(3), "large": torch.randn(1000, 10_000)}
    written = {}

    def work(rank):
        from checkpointing.storage import posix as storage

        pwrite, mine = storage.os.pwrite, []
        storage.os.pwrite = lambda *call: mine.append(pwrite(*call)) or mine[-1]
        options = CheckpointOptions()
        with TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, model=model, optimizer={}, state={}, files={})
            zeros = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
            checkpointer.load(model=zeros, optimizer={})
        assert all(torch.equal(zeros[name], model[name]) for name in model)
        return sum(mine)

    written = run_ranks(2, work, tmp_path / "ranks")
    assert abs(written[0] - written[1]) <= BLOCK_BYTES
    record = open_step(tmp_path / "run" / "step-00000001").record
    assert len(record.files[MODEL.file(1, 1)].checksums) == 3
    index = json.loads((tmp_path / "run" / "step-00000001" / MODEL.index).read_text())
    assert index["metadata"] == {"total_parameters": 10_000_003, "total_size": 40_000_012}
    assert json.loads((tmp_path / "run/step-00000001" / OPTIMIZER.index).read_text()) == {
        "metadata": {"total_parameters": 0, "total_size": 0},
        "weight_map": {},
    }


def test_damage_that_one_rank_sees_makes_all_ranks_fall_back(tmp_path):
    """Rank 1 alone reads the last block of 40 MB."""
    whole = {"large": torch.randn(1000, 10_000)}

    def work(rank):
        model = spread(whole, "rows-2")
        with TensorCheckpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            for step in (1, 2):
                path = save_now(
                    checkpointer, step, model=model, optimizer={}, state={"step": step}, files={}
                )
            if rank == 0:
                with open(path / MODEL.file(1, 1), "r+b") as file:
                    file.seek(-1, 2)
                    last = file.read(1)[0]
                    file.seek(-1, 2)
                    file.write(bytes([last ^ 1]))
            targets = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
            dist.barrier()
            state = checkpointer.load(model=targets, optimizer={})
        assert all(same_bits(local(targets[name]), local(model[name])) for name in model)
        return state["step"]

    assert run_ranks(2, work, tmp_path / "ranks") == [1, 1]


def test_a_partial_tensor_is_refused_on_all_ranks(tmp_path):
    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with TensorCheckpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, model={"gradient": partial}, optimizer={}, state={}, files={})

    for error in run_ranks(2, work, tmp_path / "ranks"):
        assert isinstance(error, ValueError)
        assert "gradient: a tensor placed as P" in str(error)
    assert not list(tmp_path.glob("run/*"))
