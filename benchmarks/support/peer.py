"""What the peers of `benchmarks.throughput` share: the recipe as one rank trains it, its
micro-batches, model and optimizer, the clock, and the JSON lines that rank 0 prints.

No resume, no validation, no metrics; tokens are read in file order from a memory map.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic import usable_cores
from trainer.data.packing import cu_seqlens_of
from trainer.models import Decoder, init_parameter, read_config
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.architecture import Architecture
from trainer.run.speed import peak_memory
from trainer.tasks.task import build_task


@dataclass(frozen=True)
class Job:
    """A recipe as one rank trains it; ranks have equal numbers of equal micro-batches."""

    recipe: Recipe
    rank: int
    world_size: int
    device: torch.device

    @property
    def architecture(self) -> Architecture:
        """The model's architecture."""
        model = self.recipe.model
        if model.architecture is None and model.init_from:
            return read_config(Path(model.init_from))
        if model.architecture is None:
            raise ValueError("the recipe has no model.architecture")
        return model.architecture

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded (ZeRO-2, ZeRO-3), or else whole on every rank.

        Raises:
            ValueError: the recipe asks for ZeRO-1, which is neither; only DeepSpeed has it.
        """
        if self.recipe.sharding == "OPTIMIZER_STATE":
            raise ValueError("no ZeRO-1 here")
        return self.recipe.strategy.name == "fsdp"

    @property
    def free_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward (ZeRO-3)."""
        return self.recipe.sharding == "FULL_SHARD"

    @property
    def mixed(self) -> bool:
        """float32 parameters and optimizer state, bfloat16 arithmetic; else float32 throughout."""
        return self.recipe.precision.dtype == "bf16"

    @property
    def replicas(self) -> int:
        """Into how many shares the batch is cut: ranks that compute a layer together have one."""
        strategy = self.recipe.strategy
        return self.world_size // (strategy.tp * strategy.pp * strategy.cp)

    @property
    def passes(self) -> int:
        """Micro-batches of a rank and step."""
        return self.recipe.batch.global_batch // (self.replicas * self.recipe.micro_batch)

    def model(self) -> Decoder:
        """The decoder on the CPU with the initial weights that the trainer draws."""
        with torch.device("meta"):
            model = Decoder(self.architecture)
        model.to_empty(device="cpu")

        def draw(name: str, parameter: nn.Parameter) -> None:
            shape = tuple(parameter.shape)
            parameter.data.copy_(init_parameter(name, shape, self.architecture, 0))

        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(draw, *zip(*model.named_parameters(), strict=True)))
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Fused AdamW with the learning rate after warm-up."""
        options = self.recipe.optimizer
        return torch.optim.AdamW(
            parameters,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def chats(self) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of chats as this trainer packs them, without end: `input_ids` and `labels`,
        each (micro_batch, seq_len) int64, the token after each input or -100. Of one rank."""
        stream = build_task(self.recipe).stream
        for first in count(0, self.recipe.micro_batch):
            batch = stream.fetch(range(first, first + self.recipe.micro_batch))
            yield {name: batch[name] for name in ("input_ids", "labels")}

    def micro_batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's micro-batches on its device, without end: `input_ids` and `labels`, each
        (micro_batch, seq_len) int64, and with `data.document_mask` also `cu_seqlens`, see
        `trainer.data.packing`."""
        rows, length = self.recipe.micro_batch, self.recipe.data.seq_len
        source = Path(self.recipe.data.sources[0].path)
        index = json.loads((source / "index.json").read_text())
        shard = min(source.glob("train-*.tokens"))
        tokens = np.memmap(shard, dtype=index["dtype"], mode="r")
        ends = torch.from_numpy(np.flatnonzero(tokens == index["eos_id"]))
        row = self.rank * rows
        while True:
            inputs, labels, documents = [], [], []
            for number in range(row, row + rows):
                at = number * length % (len(tokens) - length - 1)
                window = torch.from_numpy(tokens[at : at + length + 1].astype(np.int64))
                inputs.append(window[:-1])
                labels.append(window[1:])
                documents.append(torch.searchsorted(ends, torch.arange(at, at + length)))
            batch = {"input_ids": torch.stack(inputs), "labels": torch.stack(labels)}
            if self.recipe.data.document_mask:
                batch["cu_seqlens"] = cu_seqlens_of(torch.stack(documents))
            if self.device.type == "cuda":  # or the copies would wait for all that was launched
                batch = {key: value.pin_memory() for key, value in batch.items()}
            yield {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
            row += self.world_size * rows


@dataclass
class Clock:
    """Told after every optimizer step; rank 0 prints the Unix time of the first and of every
    `run.log_every`."""

    job: Job
    note: str = ""
    """Where the peer differs from the recipe, for the reader of the table."""
    loss: float | None = None
    """Loss of the last micro-batch that was told."""
    steps: int = 0

    def step(self, loss: Tensor | None = None) -> None:
        """A step is done. `loss` is read only after the last: reading it waits for the device."""
        run = self.job.recipe.run
        self.steps += 1
        if self.job.rank == 0 and (self.steps == 1 or self.steps % run.log_every == 0):
            if self.job.device.type == "cuda":
                torch.cuda.synchronize()
            print(json.dumps({"step": self.steps, "at": time.time()}), flush=True)
        if self.steps == run.steps and loss is not None:
            self.loss = loss.item()

    def figures(self) -> dict[str, Any]:
        """Bytes of peak memory of this process, loss and note."""
        peak = peak_memory(self.job.device)
        return {"peak_memory": peak, "loss": self.loss, "note": self.note}


def run_peer(train: Callable[[Job, Clock], None], tensor_parallel: bool = False) -> None:
    """Run one rank, started by torchrun with RECIPE.yaml [key=value …]; never returns. Rank 0 ends
    with the figures as one JSON line; a rank that fails prints {"failed": reason}."""
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    cuda = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    job = Job(recipe, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)
    code = 0
    try:
        if recipe.strategy.tp > 1 and not tensor_parallel:
            raise ValueError("no tensor parallelism here")
        clock = Clock(job)
        train(job, clock)
        if job.rank == 0:
            print(json.dumps(clock.figures()))
        if dist.is_initialized():
            dist.barrier()
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"failed": reason}))  # on any rank: torchrun soon ends the others
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo sometimes aborts in interpreter shut-down
