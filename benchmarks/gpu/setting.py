"""What cases share: where they run, the models, and training runs whose losses they read."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Figures, Size
from benchmarks.gpu.synthetic import data_set
from benchmarks.support import environment, json_lines, torchrun
from checkpointing.save.slots import available_bytes
from elastic import usable_cores

Sections = dict[str, dict[str, Any]]
"""A recipe."""

VOCABULARY = 151_936
QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_hidden_layers": 36, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""By name: where the published architectures differ from that of 0.6B."""
LLAMA3 = {
    "llama_8B": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The model with which others have published speeds, by its differences too."""
PARAMETERS = {
    "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360,
    "llama_8B": 8_030_261_248,
}  # fmt: skip
_COMMON = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SMALL = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
"""For questions of right and wrong."""
TOY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


class UnsupportedError(Exception):
    """This machine, or torch on it, cannot do what a case needs; says what is missing."""


class RunFailedError(Exception):
    """A run that a case needs did not end as it should; says how, and its last lines."""


@dataclass(frozen=True)
class Setting:
    """Where a case runs."""

    device: str
    """auto, cpu or cuda."""
    size: Size
    """toy: so small that a CPU does it in seconds."""
    scratch: Path
    """Its own folder, gone when it ends."""
    data: Path
    """Folder of synthetic data, kept."""
    others: Mapping[str, Figures]
    """Figures of cases that were done on this machine before, by name."""

    @property
    def toy(self) -> bool:
        """Whether all is to be small."""
        return self.size == "toy"

    def on_gpu(self) -> bool:
        """Whether this runs on one."""
        import torch

        return self.device != "cpu" and torch.cuda.is_available()

    def place(self) -> str:
        """Where tensors of a case are to be."""
        return "cuda" if self.on_gpu() else "cpu"

    def need_gpu(self, what: str) -> None:
        """Raises UnsupportedError on a CPU."""
        if not self.on_gpu():
            raise UnsupportedError(f"{what} needs a GPU")

    def need_host(self, nbytes: float, what: str) -> None:
        """Raises UnsupportedError where so many bytes of host memory are not available: a machine
        with one GPU often has 128 GiB."""
        if not self.toy and nbytes > available_bytes():
            raise UnsupportedError(
                f"{what}: {nbytes / 1e9:.0f} GB of host memory, and {available_bytes() / 1e9:.0f} "
                "GB are available"
            )

    def need_gpus(self, count: int) -> int:
        """So many ranks, one for each GPU; two at toy size, wherever they run.

        Raises:
            UnsupportedError: there are fewer GPUs.
        """
        import torch

        if self.toy:
            return min(count, 2)
        if count > 1 and torch.cuda.device_count() < count:
            raise UnsupportedError(
                f"{count} GPUs are needed, and there are {torch.cuda.device_count()}"
            )
        return count

    def steps(self, full: int) -> int:
        """So many, or few at toy size."""
        return min(full, 6) if self.toy else full


def architecture(setting: Setting, name: str) -> dict[str, Any]:
    """A model's architecture. `name`: a key of QWEN3 or LLAMA3, or `small`."""
    if setting.toy:
        return {**_COMMON, **TOY}
    return {**_COMMON, **{"small": SMALL, **QWEN3, **LLAMA3}[name]}


def recipe(setting: Setting, model: str, /, **sections: Mapping[str, Any]) -> Sections:
    """A recipe for a model on synthetic data, with `sections` over the defaults here: 20 steps of 8
    sequences of 512 tokens, in float32, without checkpoints.

    Toy size makes sequences and global batch small, whatever the sections say.
    """
    shape = architecture(setting, model)
    source = data_set(setting.data, shape["vocab_size"], 1 << (16 if setting.toy else 22))
    made: Sections = {
        "run": {"steps": setting.steps(20), "log_every": 1, "device": setting.place()},
        "model": {"architecture": shape},
        "data": {
            "sources": [{"path": str(source)}], "seq_len": 512, "validation_sequences": 1
        },
        "batch": {"global_batch": 8, "micro_batch": 4},
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant"},
        "strategy": {"name": "ddp"},
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every": 0, "slots": 0},
    }  # fmt: skip
    for section, keys in sections.items():
        made[section] = {**made.get(section, {}), **keys}
    if setting.toy:
        made["data"]["seq_len"] = 64
        made["batch"] = {"global_batch": 4, "micro_batch": 2}
    return made


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    directory: Path
    output: str

    def records(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        return json_lines(self.directory / "metrics.jsonl")

    def losses(self) -> list[float]:
        """Losses of every step, in order."""
        return [record["loss"] for record in self.records() if "loss" in record]

    def first_step_seconds(self) -> float:
        """From launch to the end of the first step."""
        mark = "first step after "
        line = next(line for line in self.output.splitlines() if line.startswith(mark))
        return float(line.removeprefix(mark).split(" s")[0])


def job_environment(setting: Setting) -> dict[str, str]:
    """Environment of what a case starts: this tree on its path, as many threads as cores."""
    threads = 1 if setting.toy else usable_cores()
    return {**environment(), "OMP_NUM_THREADS": str(threads)}


def command(*module: str) -> list[str]:
    """`python -m` MODULE ARGUMENT … in a process that ends with this one."""
    return [sys.executable, "-m", "elastic.process", *module]


def write_recipe(setting: Setting, name: str, sections: Sections) -> Path:
    """NAME.yaml of a run whose folder is NAME in the scratch folder."""
    path = setting.scratch / f"{name}.yaml"
    directory = {**sections["run"], "dir": str(setting.scratch / name)}
    path.write_text(json.dumps({**sections, "run": directory}), encoding="utf-8")
    return path


def train(
    setting: Setting,
    name: str,
    sections: Sections,
    program: Sequence[str] = ("trainer",),
    more: Mapping[str, str] = {},
) -> Trained:
    """Run one rank to the end.

    Args:
        setting: where.
        name: of the run's folder; one that is there goes on.
        sections: the recipe.
        program: module, and what it takes before the recipe.
        more: environment variables.

    Raises:
        RunFailedError: it ended otherwise.
    """
    path = write_recipe(setting, name, sections)
    output = run_command(setting, command(*program, str(path)), more)
    return Trained(setting.scratch / name, output)


def train_until(
    setting: Setting, name: str, sections: Sections, records: int, ranks: int = 1
) -> list[dict[str, Any]]:
    """Run one rank, or several under torchrun, until it has logged so often, and end it there: the
    last step of a run would be saved. Returns the records.

    Raises:
        RunFailedError: it ended before.
    """
    sections["run"]["steps"] = 1_000_000
    path, log = write_recipe(setting, name, sections), setting.scratch / f"{name}.log"
    metrics = setting.scratch / name / "metrics.jsonl"
    words = command("trainer", str(path))
    if ranks > 1:
        _, _, *words = torchrun(ranks, "-m", "trainer", str(path))
        words = command(*words)
    with (
        log.open("w") as output,
        subprocess.Popen(
            words,
            cwd=setting.scratch, env=job_environment(setting), stdout=output, stderr=output,
        ) as process,
    ):  # fmt: skip
        try:
            while True:
                found = [r for r in json_lines(metrics) if "loss" in r]
                if len(found) >= records:
                    return found[:records]
                if process.poll() is not None:
                    raise RunFailedError(ending(process.returncode, log.read_text()))
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
            print(log.read_text(), flush=True)


def run_command(setting: Setting, words: Sequence[str], more: Mapping[str, str] = {}) -> str:
    """Run to the end in the scratch folder; returns what was printed, which the log has too.

    Raises:
        RunFailedError: it ended badly.
    """
    print(f"$ {' '.join(words)}", flush=True)
    with subprocess.Popen(
        words,
        cwd=setting.scratch,
        env={**job_environment(setting), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)  # the log has it even if this never ends
            lines.append(line)
    output = "".join(lines)
    if process.returncode:
        raise RunFailedError(ending(process.returncode, output))
    return output


def ending(code: int, output: str) -> str:
    """How a run ended, in a line."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line] or lines
    return f"{how}: {telling[-1].strip() if telling else 'no output'}"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of losses, step by step."""
    if len(ours) != len(theirs) or not ours:
        raise RunFailedError(f"{len(ours)} losses against {len(theirs)}")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def device_memory() -> int:
    """Bytes of the GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def free_host_memory() -> int:
    """Bytes that shared memory can take: what it has free, and what the machine has available."""
    shared = os.statvfs("/dev/shm")
    return min(shared.f_bavail * shared.f_frsize, available_bytes())
