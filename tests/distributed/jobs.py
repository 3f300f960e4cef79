"""One job of a tiny model, and what it left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpointing.slots import living_folders, read_manifest

ROOT = Path(__file__).parents[2]
soak = pytest.mark.skipif(
    not os.environ.get("SOAK"), reason="in `make soak`, to keep `make test` short"
)
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


class Job:
    """One torchrun job; a single rank is started without torchrun, as a user would."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        overrides: Sequence[str],
        recipe: str = "recipe.yaml",
        torchrun: Sequence[str] = (),
        program: Sequence[str] = ("trainer",),
    ) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        worker = ["-m", *program, recipe, *overrides]
        self.process = subprocess.Popen(
            [sys.executable, *([*launcher, *torchrun] if ranks > 1 else []), *worker],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """(exit code, output), at the latest after two minutes."""
        try:
            output, _ = self.process.communicate(timeout=120)
        finally:
            self.kill()
        return self.process.returncode, output

    def kill(self) -> None:
        """SIGKILL to the launcher, as when a machine is lost; its ranks must die with it."""
        ranks = self.ranks()
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        while alive := [pid for pid in ranks if Path(f"/proc/{pid}/stat").exists()]:
            if time.monotonic() > deadline:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"ranks {alive} outlived their launcher")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Process ids of the ranks that the launcher has started."""
        try:
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in children.split()]


def records(folder: Path, run: str) -> list[dict]:
    """What the run wrote to metrics.jsonl; a line that is just being written is left out."""
    path = folder / run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path, run: str) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in records(folder, run) if "loss" in record}


def wait_for_step(folder: Path, run: str, step: int, job: Job) -> None:
    """Until the run has logged `step`."""
    deadline = time.monotonic() + 60
    while max(losses(folder, run), default=0) < step:
        assert job.process.poll() is None, job.process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.01)


def wait_for_memory(run: Path, step: int, seconds: float = 60) -> None:
    """Until `step` or a later one is in shared memory: on a busy machine that takes a while."""
    directory = str((run / "checkpoints").absolute())
    deadline = time.monotonic() + seconds
    while True:
        manifests = [
            read_manifest(path)
            for folder in living_folders(directory)
            for path in folder.glob("slot-*.json")
        ]
        if any(found and found.step >= step for found in manifests):
            return
        assert time.monotonic() < deadline, f"step {step} did not get into memory"
        time.sleep(0.02)
