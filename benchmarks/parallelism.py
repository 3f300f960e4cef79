"""Model parallelism, measured; `--case ring-memory`: what a rank of a ring holds of a sequence.

A Llama of 1 block (hidden 64, 2 query heads and 1 key head of 32, vocabulary 1,024) in float32
computes loss and gradients of one sequence on 1, 2 and 4 ranks under context parallelism. Documents
have 8,192 tokens each, so that it ends in minutes on a CPU; what is held does not depend on them.
Memory is the growth of a rank's resident set, at its largest, over that with the model built and
the data drawn.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import arguments, report, run, torchrun
from elastic.world import join_world, leave_world
from trainer.data.documents import cu_seqlens_of
from trainer.models.decoder import Decoder
from trainer.parallel.context import Context
from trainer.parallel.parallelize import means
from trainer.recipe.architecture import Architecture
from trainer.run.speed import peak_memory

DOCUMENT = 8192


def main() -> None:
    options = arguments(__doc__ or "", case="ring-memory", tokens=65536)
    if options.case != "ring-memory":
        sys.exit(f"--case: there is no {options.case!r}; it is ring-memory")
    found: dict[int, Any] = {}
    for ranks in (1, 2, 4):
        worker = ("-m", "benchmarks.parallelism", "measure", str(options.tokens))
        output = run(torchrun(ranks, *worker), Path.cwd())
        found[ranks] = json.loads(output.splitlines()[-1])
    whole = found[1]
    rows = [
        {
            "ranks": ranks,
            "MB of each rank": ", ".join(f"{nbytes / 1e6:,.0f}" for nbytes in one["grown"]),
            "most, of one rank's": f"{max(one['grown']) / max(whole['grown']):.2f}",
            "loss, relative difference": f"{abs(one['loss'] - whole['loss']) / whole['loss']:.0e}",
            "seconds": f"{one['seconds']:.1f}",
        }
        for ranks, one in found.items()
    ]
    title = f"{options.tokens:,} tokens, forward and backward, on 1, 2 and 4 ranks of a ring"
    report(title, rows, found, options.json)


def measure(tokens: int) -> None:
    """Prints what this world took for one step. On all ranks."""
    world = join_world("cpu", 600)
    torch.manual_seed(0)
    model = Decoder(
        Architecture(
            model_type="llama",
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=tokens,
            tie_word_embeddings=True,
        )
    )
    ids = torch.randint(1024, (1, tokens))
    cu_seqlens = cu_seqlens_of(torch.arange(tokens)[None] // DOCUMENT)
    inputs = {"input_ids": ids, "labels": ids.roll(-1, 1), "cu_seqlens": cu_seqlens}
    group = dist.group.WORLD
    assert group
    before, began = peak_memory(world.device), time.perf_counter()
    if world.world_size == 1:
        loss = means(model(**inputs))["loss"]
    else:
        loss = Context(group)(model, inputs)
    loss.backward()
    seconds = time.perf_counter() - began
    grown = [0] * world.world_size
    dist.all_gather_object(grown, peak_memory(world.device) - before)
    if world.is_main:
        print(json.dumps({"grown": grown, "loss": loss.item(), "seconds": seconds}))
    leave_world(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(int(sys.argv[2]))
    else:
        main()
