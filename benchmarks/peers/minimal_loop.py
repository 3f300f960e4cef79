"""The named peer: the loop that one would write by hand. Start it with torchrun.

The same decoder, AdamW, sequences per step and precision as the recipe, with FSDP2 or DDP straight
from PyTorch's tutorials: no resume, no validation, no metrics, no uneven batches, tokens read in
file order from a memory map. It prints one JSON line on rank 0.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer.metrics import peak_memory
from trainer.models import Decoder, init_parameter
from trainer.recipe import load_recipe


def main() -> None:
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.precision.dtype]

    architecture = recipe.model.architecture
    model = Decoder(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, tuple(parameter.shape), architecture, 0))
    model.to(device)
    blocks = list(model.blocks)
    if recipe.strategy.compile:
        for block in blocks:
            block.compile()
    context = nullcontext()
    module: torch.nn.Module = model
    if recipe.strategy.name == "fsdp":
        mesh = init_device_mesh(device.type, (world_size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        reshard = recipe.sharding == "FULL_SHARD"
        for unit in (*blocks, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    else:
        context = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
        if world_size > 1:
            module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.optimizer.lr, betas=recipe.optimizer.betas, fused=True
    )

    source = Path(recipe.data.sources[0].path)
    index = json.loads((source / "index.json").read_text())
    shard = next(iter(sorted(source.glob("train-*.tokens"))))
    tokens = np.memmap(shard, dtype=index["dtype"], mode="r")
    ends = torch.from_numpy(np.flatnonzero(tokens == index["eos_id"]))
    rows, length = recipe.batch.micro_batch, recipe.data.seq_len
    passes = recipe.batch.global_batch // (world_size * rows)
    cursor, seconds, loss = 0, [], torch.zeros(())
    for _ in range(recipe.run.steps):
        started = time.perf_counter()
        for number in range(passes):
            inputs, labels, documents = [], [], []
            for row in range(rows):
                at = (cursor + (number * world_size + rank) * rows + row) * length
                at %= len(tokens) - length - 1
                window = torch.from_numpy(tokens[at : at + length + 1].astype(np.int64))
                inputs.append(window[:-1])
                labels.append(window[1:])
                documents.append(torch.searchsorted(ends, torch.arange(at, at + length)))
            batch = {"input_ids": torch.stack(inputs), "labels": torch.stack(labels)}
            if recipe.data.document_mask:
                batch["document_ids"] = torch.stack(documents).int()
            batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            last = number == passes - 1
            if isinstance(module, DistributedDataParallel):
                sync = nullcontext() if last else module.no_sync()
            else:
                sync = nullcontext()
                if recipe.strategy.name == "fsdp":
                    module.set_requires_gradient_sync(last)
            with sync:
                with context:
                    loss = module(**batch) / passes
                loss.backward()
        cursor += recipe.batch.global_batch
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1 and rank == 0:
            print(json.dumps({"first_step_at": time.time()}), flush=True)
    if rank == 0:
        # The first steps warm up, as the trainer's own figures leave them out.
        measured = seconds[recipe.run.log_every :] or seconds
        rate = recipe.batch.global_batch * length / median(measured)
        memory = peak_memory(device)
        print(json.dumps({"tokens_per_second": rate, "peak_memory": memory, "loss": loss.item()}))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts in interpreter shut-down


if __name__ == "__main__":
    main()
