"""One job of a tiny model, and what it left behind."""

import atexit
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from benchmarks.support import json_lines
from checkpointing.load.memory import token
from checkpointing.save import link
from checkpointing.save.peers import read_manifest
from checkpointing.storage.folders import living_folders
from elastic.process import die_with_parent
from tests.checkpointing import forked_writer
from trainer.tools.report.report import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOAK = bool(os.environ.get("SOAK"))
soak = pytest.mark.skipif(not SOAK, reason="in `make soak`, to keep `make test` short")
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.distributed.warm", __name__]
if SOAK and "FAKE_CUDA" not in os.environ:  # where many jobs need it; it may import torchao
    PRELOADED += ["transformers.modeling_utils", "transformers.generation.utils"]
FORKS.set_forkserver_preload(PRELOADED)
RECIPE = """\
run: {dir: run, steps: 50, log_every: 1, seed: 7, device: cpu}
model:
  architecture:
    {model_type: qwen3, vocab_size: 257, hidden_size: 48, intermediate_size: 96,
     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
     tie_word_embeddings: true}
data: {sources: [{path: data}], seq_len: 32, validation_sequences: 10}
batch: {global_batch: 8, micro_batch: 2}
optimizer: {lr: 3e-3}
schedule: {warmup_steps: 5}
precision: {dtype: fp32}
checkpoint: {every: 0}
"""

MOE = (
    "model.architecture.model_type=qwen3_moe",
    "model.architecture.options={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: "
    "32, norm_topk_prob: true, router_aux_loss_coef: 0.01, router_bias_update_rate: 0.001}",
)
GPT_OSS = (
    "model.architecture.model_type=gpt_oss",
    "model.architecture.tie_word_embeddings=false",
    "model.architecture.options={sliding_window: 8, num_local_experts: 8, num_experts_per_tok: 2, "
    "output_router_logits: true, router_aux_loss_coef: 0.01}",
)
EP = ("strategy.ep=2",)


class Job:
    """One job: its ranks, forked from a process that has imported what they need and started
    nothing, in the environment that torchrun would give them. Their writers are forked, too. A
    single rank is started as by a user without torchrun, unless `torchrun` is true. `odd` is added
    to the environment of the last."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        overrides: Sequence[str] = (),
        recipe: str = "recipe.yaml",
        program: Sequence[str] = ("trainer",),
        torchrun: bool = False,
        odd: Mapping[str, str] | None = None,
    ) -> None:
        arguments = [*program, recipe, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        torchrun = torchrun or ranks > 1
        if torchrun:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": f"{self._store.port}",
                "WORLD_SIZE": f"{ranks}",
                "LOCAL_WORLD_SIZE": f"{ranks}",
            }
        self._log = folder / f"job-{time.monotonic_ns()}.log"
        self.ranks = []
        for rank in range(ranks):
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if torchrun else {}
            own |= (odd or {}) if rank == ranks - 1 else {}
            start = environment | own
            self.ranks.append(_fork(arguments, folder, start, self._log, forked_writer.launch))

    def wait(self) -> tuple[int, str]:
        """(exit code of the first rank that failed, or 0; output), at the latest after two
        minutes. When a rank fails, the others are ended, as torchrun does."""
        deadline = time.monotonic() + 120
        try:
            while running := [rank for rank in self.ranks if rank.exitcode is None]:
                seconds = max(0, deadline - time.monotonic())
                assert wait([rank.sentinel for rank in running], seconds), self.output()
                failed = [rank.exitcode for rank in self.ranks if rank.exitcode]
                if failed:
                    return failed[0], self.output()
        finally:
            self.kill()
        return 0, self.output()

    def ended(self) -> bool:
        """Whether a rank has."""
        return any(rank.exitcode is not None for rank in self.ranks)

    def output(self) -> str:
        """What its ranks have printed."""
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        """SIGKILL to all ranks at once, as when a machine is lost."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


class Forked:
    """A `Start` of LocalNodes by a fork of what has imported torch, which saves two seconds of a
    core for each agent and store. It runs the same modules as an interpreter of its own would."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._process = _fork(command, folder, environment, log)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self._process.kill()


def _fork(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    launch_writer: Callable[[], Any] = link.launch,
) -> multiprocessing.process.BaseProcess:
    log.touch()
    arguments = (folder, log, environment, command, launch_writer)
    process = FORKS.Process(target=_become, args=arguments)
    # The server, which the first fork starts, finds what it preloads by its working directory. If
    # it finds nothing it says nothing, and each fork imports torch and the trainer.
    with chdir(ROOT):
        process.start()
    return process


def _become(
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    command: Sequence[str],
    launch_writer: Callable[[], Any],
) -> None:
    """`python -m` COMMAND in a process that was just forked."""
    die_with_parent()
    link.launch = launch_writer
    assert PRELOADED[0] in sys.modules, "the fork server has preloaded nothing"
    os.setsid()
    # As in an interpreter of its own:
    resource_tracker._resource_tracker.__init__()
    multiprocessing.set_start_method(None, force=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(folder), *filter(None, path)]
    sys.argv = list(command)
    atexit._clear()
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:  # as a process that was not forked, which this one would not do
        atexit._run_exitfuncs()


def records(folder: Path, run: str) -> list[dict]:
    """Records of metrics.jsonl in the newest attempt's lineage."""
    return read_metrics(folder / run)


def losses(folder: Path, run: str) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in records(folder, run) if "loss" in record}


def starts(folder: Path, run: str) -> list[dict]:
    """The attempts of a run, by its ledger."""
    lines = json_lines(folder / run / "ledger.jsonl")
    return [line for line in lines if line["kind"] == "start"]


LAYOUT = "layout"
"""What a test records of one: (ranks, overrides of the recipe, what `assert_follows` returns)."""
THIRTY = ("run.steps=30", "run.evaluate_every=15")
SIX = ("run.steps=6", "run.evaluate_every=6")


def told(folder: Path, run: str) -> tuple[list[float], ...]:
    """(losses, gradient norms, validation losses) of a run."""
    found = records(folder, run)
    return tuple(
        [record[key] for record in found if key in record]
        for key in ("loss", "grad_norm", "validation_loss")
    )


def assert_follows(
    name: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> list[float]:
    """What was `told` of a run is, but for rounding, what was told of another; returns the largest
    relative differences."""
    differences = [
        max(abs(a - b) / b for a, b in zip(x, y, strict=True))
        for x, y in zip(ours, theirs, strict=True)
    ]
    print(name, *differences)
    assert all(d <= most for d, most in zip(differences, (1e-5, 1e-4, 1e-5), strict=True)), name
    return differences


def assert_audited(folder: Path, run: str, *words: str) -> str:
    """An audit of all steps of a run holds, and leaves the run as it was; returns its output."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (folder / run).rglob("*") if path.is_file()}

    before = contents()
    job = Job(folder, 1, ("--audit", "999", *words), run, ("trainer.cli", "replay"))
    code, output = job.wait()
    assert code == 0, output
    assert "the ledger holds" in output
    assert contents() == before
    return output


def wait_for_step(folder: Path, run: str, step: int, job: Job) -> None:
    """Until the run has logged `step`."""
    deadline = time.monotonic() + 60
    while max(losses(folder, run), default=0) < step:
        assert not job.ended(), job.output()
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.01)


def wait_for_memory(run: Path, step: int, seconds: float = 60) -> None:
    """Until `step` or a later one is in shared memory: on a busy machine that takes a while."""
    directory = str((run / "checkpoints").absolute())
    deadline = time.monotonic() + seconds
    while True:
        manifests = [
            read_manifest(path, token(run / "checkpoints") or "")
            for folder in living_folders(directory)
            for path in folder.glob("slot-*.manifest")
        ]
        if any(found and found.step >= step for found in manifests):
            return
        assert time.monotonic() < deadline, f"step {step} did not get into memory"
        time.sleep(0.02)


def deadly(run: str, kills: Mapping[int, Sequence[tuple[int, int, str]]]) -> list[str]:
    """Overrides of a recipe under which ranks die, see deadly.py, and others go on."""
    factory, options = "tests.distributed.deadly:schedule", {"run": run, "kills": kills}
    return [
        f"run.dir={run}",
        f"schedule={json.dumps({'factory': factory, 'factory_options': options})}",
        *("elastic.snapshot_every=1", "checkpoint.slots=2", "data.workers=0"),
    ]


def assert_kept(output: str, ranks: Sequence[int]) -> None:
    """After the first deaths, by a job's output, so many ranks held what others had to load."""
    told = re.findall(r"restored step \d+ from memory(?:, (\d+) of \d+ ranks by)?", output)
    assert [int(kept or 0) for kept in told[: len(ranks)]] == [*ranks], output
