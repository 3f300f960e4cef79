"""Runs on `device: cuda`: the losses of the CPU, and checkpoints with the bits of the state, with
copies that are done at once and as late as may be."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support import python_path
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, losses, records, starts, wait_for_memory, wait_for_step

SHORT = ("run.steps=6", "schedule={}", "checkpoint.every=2", "checkpoint.when_busy=wait")
# FlexAttention, which float32 would take, has no kernel that could be called here.
CUDA = (*SHORT, "run.device=cuda", "checkpoint.keep=0", "model.attention=sdpa")
VARLEN = "model.attention=varlen"
KEPT = ["tests.fake_cuda.recorded"]
TOLERANCE = 1e-5
"""Relative, of losses in float32: ranks add in another order."""
STRATEGIES = {
    "ddp": ["strategy.name=ddp"],
    "no-shard": ["strategy.sharding=NO_SHARD"],
    "optimizer-state": ["strategy.zero=1"],
    "shard-grad-op": ["strategy.sharding=SHARD_GRAD_OP"],
    "full-shard": [],
    "full-recompute": ["strategy.activation_checkpointing=full"],
    "selective-recompute": ["strategy.activation_checkpointing=selective"],
    "exact": ["run.determinism=exact"],
}
OFFLOADED = {
    "cpu": ["strategy.offload=cpu"],
    "nvme": ["strategy.offload=nvme", "strategy.offload_directory=offload"],
}


@pytest.fixture(params=["early", "late"])
def copies(request, monkeypatch):
    """When copies are done."""
    monkeypatch.setenv("FAKE_CUDA", request.param)
    return request.param


@pytest.fixture(scope="session")
def on_cpu(workspace):
    """Losses of one rank on the CPU."""
    from tests.distributed.jobs import Job

    code, output = Job(workspace, 1, ["run.dir=on-cpu", "strategy.name=ddp", *SHORT]).wait()
    assert code == 0, output
    return losses(workspace, "on-cpu")


@pytest.fixture
def same(workspace, start, on_cpu):
    """same(run, ranks, *overrides): trains on cuda, and compares losses and checkpoints."""

    def same(run, ranks, *overrides, tolerance=TOLERANCE, stages=1):
        output = finish(start(ranks, f"run.dir={run}", *CUDA, *overrides, program=KEPT))
        found = losses(workspace, run)
        assert found.keys() == on_cpu.keys()
        for step, loss in on_cpu.items():
            assert found[step] == pytest.approx(loss, rel=tolerance), step
        for step in (2, 4, 6):
            assert_saved(workspace / run, step, stages)
        return output

    return same


def finish(job):
    """Its output, once it has ended well, with every kernel done."""
    code, output = job.wait()
    assert code == 0, output
    assert "did nothing" not in output
    assert "crosses the end" not in output
    return output


def assert_saved(run, step, stages=1):
    """The checkpoint has the bits that the state had; of a pipeline that of the first stage."""
    kept = torch.load(run / f"kept-{step}.pt")
    saved = {}
    for path in (run / "checkpoints" / f"step-{step:08}").rglob("*.safetensors"):
        saved |= load_file(path)
    assert kept.keys() == saved.keys() if stages == 1 else kept.keys() < saved.keys()
    for name, tensor in kept.items():
        assert saved[name].dtype == tensor.dtype, name
        assert saved[name].equal(tensor), f"{name} at step {step}"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy(same, copies, strategy, ranks):
    same(f"{strategy}-{ranks}-{copies}", ranks, *STRATEGIES[strategy])


def test_hybrid_shard(same, copies):
    hybrid = ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]
    same(f"hybrid-{copies}", 4, *hybrid)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", OFFLOADED)
def test_offload(same, copies, place, ranks):
    same(f"offload-{place}-{ranks}-{copies}", ranks, *OFFLOADED[place])


LAYOUTS = {
    "tp2": ["strategy.tp=2", "strategy.sequence_parallel=true"],
    "pp2": ["strategy.pp=2", "batch.micro_batch=1"],
    "pp2-zero-bubble": [
        *("strategy.pp=2", "batch.micro_batch=1", "strategy.zero=2"),
        "strategy.pp_schedule=zero_bubble",
    ],
    "cp2": ["strategy.cp=2", "model.attention=auto", "precision.dtype=bf16"],
    "tp2-pp2": ["strategy.tp=2", "strategy.pp=2", "batch.micro_batch=1"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(same, copies, layout):
    ranks = 4 if layout == "tp2-pp2" else 2
    low = "precision.dtype=bf16" in LAYOUTS[layout]
    tolerance = 2e-2 if low else TOLERANCE
    stages = 1 + ("strategy.pp=2" in LAYOUTS[layout])
    same(f"{layout}-{copies}", ranks, *LAYOUTS[layout], tolerance=tolerance, stages=stages)


DEEP = "model.architecture.num_hidden_layers=6"


@pytest.fixture(scope="session")
def deep_on_cpu(workspace):
    from tests.distributed.jobs import Job

    overrides = ["run.dir=deep-on-cpu", "strategy.name=ddp", *SHORT, DEEP]
    code, output = Job(workspace, 1, overrides).wait()
    assert code == 0, output
    return losses(workspace, "deep-on-cpu")


@pytest.mark.parametrize(("ranks", "schedule"), [(4, "1f1b"), (3, "interleaved_1f1b")])
def test_ranks_between_others(workspace, start, copies, deep_on_cpu, ranks, schedule):
    """Of a pipeline: what one receives ahead holds up nothing that it sends."""
    run = f"between-{schedule}-{copies}"
    finish(start(
        ranks, f"run.dir={run}", *CUDA, DEEP, f"strategy.pp={ranks}", "batch.micro_batch=1",
        f"strategy.pp_schedule={schedule}", f"strategy.pp_stages_per_rank={1 + ranks % 2}",
    ))  # fmt: skip
    assert losses(workspace, run) == pytest.approx(deep_on_cpu, rel=TOLERANCE)


def test_without_slots(same, copies):
    output = same(f"no-slots-{copies}", 2, "checkpoint.slots=0")
    assert "no checkpoint slots" in output


def test_bf16(same, copies):
    same(f"bf16-{copies}", 2, "precision.dtype=bf16", VARLEN, tolerance=2e-2)


def test_flash_attention_3(same, copies):
    """torch calls the package that stands for it, here in packages/."""
    documents = ["precision.dtype=bf16", "model.attention=auto"]
    output = same(f"flash-{copies}", 2, *documents, tolerance=2e-2)
    assert "attention: FlashAttention-3\n" in output


def test_fp16_overflows_and_goes_on(workspace, start, copies):
    """A scale that is far too large is halved, step by step, until one fits."""
    run = f"fp16-{copies}"
    finish(start(
        2, f"run.dir={run}", *CUDA, "precision.dtype=fp16", VARLEN, f"precision.loss_scale={2**24}",
        "run.steps=12", program=KEPT,
    ))  # fmt: skip
    scales = [r["loss_scale"] for r in records(workspace, run) if "loss_scale" in r]
    assert scales[0] == 2**23, "the first step did not overflow"
    assert scales[-1] == scales[-2] < 2**23, "it never found a scale that fits"
    assert_saved(workspace / run, 12)


def test_profile(workspace, start, copies):
    run = f"profile-{copies}"
    finish(start(
        2, f"run.dir={run}", *CUDA, "tracking.profile_steps=2", "tracking.profile_after=2",
    ))  # fmt: skip
    assert list((workspace / run).rglob("*.trace.json.gz"))


LARGE = (
    "model.architecture.hidden_size=384",
    "model.architecture.intermediate_size=3072",
    "model.architecture.num_hidden_layers=3",
    "batch.global_batch=2",
    "run.steps=2",
)
"""11 M parameters: files of 44 and 87 MB."""


def test_slots_are_registered_in_portions(workspace, start, copies, monkeypatch):
    """The fake refuses a copy that crosses two registrations, as a GPU does."""
    monkeypatch.setenv("FAKE_CUDA_TRACE", "1")
    run = f"large-{copies}"
    output = finish(start(1, f"run.dir={run}", *CUDA, *LARGE, program=KEPT))
    sizes = [int(size) for size in re.findall(r"registered (\d+) bytes", output)]
    assert 15e6 < max(sizes) <= 16 << 20
    assert sum(sizes) > 2 * 130e6, "two slots"
    assert_saved(workspace / run, 2)


def test_killed_and_gone_on_with_from_memory(workspace, start, copies, on_cpu):
    """All ranks at once, as when a machine's job is killed; the next world is smaller."""
    run = f"killed-{copies}"
    common = (f"run.dir={run}", *CUDA, "elastic.snapshot_every=1", "checkpoint.every=0")
    job = start(2, *common, "run.steps=400", "schedule={}")
    wait_for_step(workspace, run, 12, job)
    wait_for_memory(workspace / run, 10)
    job.kill()
    output = finish(start(1, *common, "run.steps=420"))
    assert "restored step" in output
    assert "from memory" in output
    assert max(losses(workspace, run)) == 420


def test_a_rank_killed_under_torchrun(workspace, tmp_path, copies):
    """The other goes on in place: its communicators are aborted, and its process stays."""
    run = f"torchrun-{copies}"
    arguments = (f"run.dir={run}", "run.device=cuda", "run.steps=60", "elastic.snapshot_every=1")
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *arguments], folder=workspace, nnodes="1", logs=tmp_path,
        ranks=2, environment={"PYTHONPATH": python_path(ROOT, workspace)},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        wait_for_memory(workspace / run, 10, 90)
        survivor, victim = node.trainers()
        os.kill(victim, signal.SIGKILL)
        assert nodes.wait(150) == [0], node.text()
        output = node.text()
    assert "restored step" in output
    assert "did nothing" not in output
    assert [start["pid"] for start in starts(workspace, run)] == [survivor, survivor]
    assert sorted(losses(workspace, run)) == list(range(1, 61))


def test_a_model_of_transformers_beside_torchao(workspace, start):
    """Ranks are forked from a process that has imported transformers. Importing torchao, which
    transformers would do, opens a CUDA context there."""
    pytest.importorskip("torchao")
    theirs = pytest.importorskip("transformers")
    config = theirs.Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    theirs.AutoModelForCausalLM.from_config(config).save_pretrained(workspace / "of-transformers")
    command = [
        *(sys.executable, "-m", "trainer.cli", "train", "recipe.yaml", "--nproc-per-node", "1"),
        *(*SHORT, "run.dir=transformers", "run.device=cuda", "model.architecture=null"),
        *("model.init_from=of-transformers", "model.implementation=transformers"),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run(command, cwd=workspace, env=environment, check=True)
    assert losses(workspace, "transformers").keys() == {*range(1, 7)}


def test_an_import_that_opens_cuda_before_the_fork_is_named(workspace, tmp_path):
    (tmp_path / "opener.py").write_text("import torch\n\ntorch.cuda.init()\n")
    command = [
        *(sys.executable, "-m", "trainer.cli", "train", "recipe.yaml", "--nproc-per-node", "1"),
        *(*SHORT, "run.dir=opened", "run.device=cuda", "--max-restarts", "0"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([python_path(ROOT), str(tmp_path)]),
        "PERDURE_PRELOAD": "trainer.run.worker,opener",
    }
    done = subprocess.run(
        command, cwd=workspace, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "an import has opened CUDA in the process that ranks are forked from" in done.stderr
    assert "Cannot re-initialize CUDA" not in done.stderr
