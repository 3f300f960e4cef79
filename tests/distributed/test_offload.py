"""State on a disk: the same bits as in memory, under a memory limit that the state exceeds."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from benchmarks.support import python_path
from benchmarks.support.control_groups import NoLimitError, memory_limit
from checkpointing import optimizer_tensors
from tests.distributed.jobs import ROOT, losses, soak, wait_for_step
from tests.distributed.test_resume import SHORT, assert_same
from trainer.optim.adamw import ADAMW
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer
from trainer.parallel import offload
from trainer.parallel.offload import OffloadFile, bytes_needed
from trainer.recipe import OptimizerSection, RecipeError, load_recipe
from trainer.run.preflight import check_inputs
from trainer.tasks.task import build_task

NVME = ("strategy.offload=nvme", "strategy.offload_directory=offload")


def test_the_same_bits_wherever_the_state_lives(workspace, start, train):
    """Begun in host memory, killed, and gone on with from the disk; gradients are clipped."""
    common = (*SHORT, "run.steps=8", "checkpoint.every=2", "optimizer.clip_norm=0.5")
    train(2, "run.dir=in-memory", *common)
    job = start(2, "run.dir=moved", *common, "strategy.offload=cpu")
    wait_for_step(workspace, "moved", 4, job)
    job.kill()
    output = train(2, "run.dir=moved", *common, *NVME)
    assert "resuming after step" in output
    assert re.search(r"checkpoint slot\(s\) of .* MB in offload", output)
    assert_same(workspace, "in-memory", "moved")
    assert not list((workspace / "offload").iterdir()), "files without names leave nothing behind"


@pytest.mark.parametrize("exact", [False, True])
def test_an_update_in_portions_has_the_bits_of_a_whole_one(tmp_path, monkeypatch, exact):
    """Parameters of many portions, of parts of one, and one that is larger than all buffers."""
    monkeypatch.setattr(offload, "PORTION_BYTES", 2 * 4096)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 700), (), (50, 1000), (7,), (2047,), (1, 1)]

    def trained(file):
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        options = OptimizerSection(lr=1e-2)
        model = nn.ParameterList(weights)
        if file:
            file.take_weights(model, torch.device("cpu"))
            file.take_gradients(model.parameters())
        named = dict(model.named_parameters())
        like = file.zeros_like if file else torch.zeros_like
        optimizer = build_optimizer(named, options, exact=exact, zeros_like=like)
        for _ in range(3):
            for weight in named.values():
                weight.grad = None
            sum((w * torch.randn(w.shape, generator=generator)).sum() for w in weights).backward()
            portions = file.portions(optimizer) if file else [optimizer.param_groups]
            update(optimizer, portions, 0.3)
        assert len(optimizer.state) == len(shapes)
        tensors = {**named, **optimizer_tensors(optimizer, named)}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    nbytes = bytes_needed([nn.Parameter(torch.empty(s)) for s in shapes], ADAMW.moments)
    on_disk = trained(OffloadFile(str(tmp_path), nbytes, ADAMW.moments))
    generator.manual_seed(0)
    in_memory = trained(None)
    assert on_disk.keys() == in_memory.keys()
    assert [name for name in on_disk if not on_disk[name].equal(in_memory[name])] == []


def test_weights_come_into_memory_ahead_of_use(tmp_path):
    """In forward those of the next block; in backward of the last but one, as FSDP asks for the
    last itself."""
    ahead = []

    class Block(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number, self.first, self.second = number, nn.Linear(512, 512), nn.Linear(512, 512)

        def forward(self, inputs):
            expect(self.number + 1)
            middle = self.first(inputs)
            middle.register_hook(lambda _: expect(self.number - 2))
            return self.second(middle)

    def expect(number):
        if 0 <= number < len(model):
            deadline = time.monotonic() + 5
            while not in_memory(model[number]) and time.monotonic() < deadline:
                time.sleep(0.001)
            ahead.append((number, in_memory(model[number])))

    def forget():
        file._map.flush()
        file._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file._direct, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not any(map(in_memory, model))

    model = nn.Sequential(*map(Block, range(4)))
    file = OffloadFile(str(tmp_path), bytes_needed(model.parameters(), ()), ())
    file.take_weights(model, torch.device("cpu"))
    file.read_ahead(model, list(model))
    forget()
    outputs = model(torch.randn(8, 512))
    forget()
    outputs.sum().backward()
    assert ahead == [(1, True), (2, True), (3, True), (1, True), (0, True)]


def in_memory(module):
    """Whether the kernel holds all pages of all weights."""
    for weight in module.parameters():
        pages = (ctypes.c_ubyte * (-(-weight.nbytes // mmap.PAGESIZE)))()
        place, length = ctypes.c_void_p(weight.data_ptr()), ctypes.c_size_t(weight.nbytes)
        assert ctypes.CDLL(None).mincore(place, length, pages) == 0
        if not all(page & 1 for page in pages):
            return False
    return True


LARGE = (
    "model.architecture.hidden_size=512",
    "model.architecture.intermediate_size=1536",
    "model.architecture.num_hidden_layers=18",
    "model.architecture.head_dim=128",
    "precision.dtype=bf16",
    "batch.global_batch=1",
    "batch.micro_batch=1",
    "optimizer.lr=3e-4",
    "schedule.warmup_steps=0",
    "run.steps=3",
)
OPTIMIZER_STATE = 8 * 56_000_000
LIMIT = 420 << 20


@soak
def test_trains_under_a_memory_limit_that_its_optimizer_state_exceeds(workspace, train):
    assert LIMIT < OPTIMIZER_STATE
    command = [sys.executable, "-m", "trainer", "recipe.yaml", *LARGE, "run.dir=limited", *NVME]
    try:
        with memory_limit(LIMIT) as group:
            limited = subprocess.run(
                group.command(command),
                cwd=workspace,
                env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert limited.returncode == 0, limited.stderr
            assert group.most <= LIMIT
    except NoLimitError as reason:
        pytest.skip(str(reason))
    assert re.search(r"decoder: 5[6-9]\.\d M parameters", limited.stdout)
    train(1, "run.dir=unlimited", *LARGE)
    assert losses(workspace, "limited") == losses(workspace, "unlimited")
    assert len(losses(workspace, "limited")) == 3


LARGEST = (f"model.architecture.hidden_size={1 << 30}",)


def test_a_disk_without_room_is_refused_before_training(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    refusal = r"strategy.offload_directory: offload has .* GB free, but .* \(([\d,]+) bytes\)"
    needed = []
    for more in ((), ("strategy.pp=2",), ("strategy.tp=2",)):  # two ranks share all of it
        recipe = load_recipe("recipe.yaml", [*NVME, *LARGEST, *more])
        with pytest.raises(RecipeError, match=refusal) as error:
            check_inputs(recipe, build_task(recipe), 0, 2, 2)
        needed += re.findall(refusal, str(error.value))
    assert len(needed) == 3
    assert len({*needed}) == 1
    with pytest.raises(RecipeError, match=r"offload cannot take the .* GB of this rank: "):
        OffloadFile("offload", 1 << 60, ())
    assert not list((workspace / "offload").iterdir())
    with pytest.raises(RecipeError, match=r"recipe.yaml cannot take .*: File exists"):
        OffloadFile("recipe.yaml", 4096, ())
