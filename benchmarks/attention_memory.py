"""Attention inside documents on the CPU at a long sequence: memory and time of each way.

Layers as those of SmolLM2-135M (hidden 576, 9 query and 3 key/value heads of 64) in float32, one
rank, without the output head. `--recompute full` keeps only the inputs of each layer. Documents
have lengths as in C4 (median 300 tokens, mean 480). "bool mask" is the dense mask that trainers
give to `scaled_dot_product_attention`. Each run is a process of its own; they take turns.

`grid`: attention alone on one core, forward and backward, by length of sequences and documents: the
loop over documents beside the additive mask, which is made once.
"""

import json
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.support import arguments, report, run, spread
from trainer.data.packing import cu_seqlens_of
from trainer.models.attention import AttentionDocuments, attend, choose_attention, locate
from trainer.models.decoder import Decoder
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.recipe.architecture import Architecture
from trainer.run.speed import peak_memory

WAYS = {"varlen": "loop over documents", "sdpa": "one additive mask", "bool": "bool mask"}
"""By word: name. `varlen` is what `model.attention: auto` takes at this length."""
HEADS, GROUPS, HEAD_DIM = 4, 2, 64  # of the grid


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, tokens=8192, layers=4, recompute="none")
    size = [str(options.tokens), str(options.layers), options.recompute]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.attention_memory", "measure", way, *size]
            found[way].append(json.loads(run(command, Path.cwd()).splitlines()[-1]))
    rows = []
    for way, name in WAYS.items():
        runs = found[way]
        paired = zip(found["bool"], runs, strict=True)
        rows.append(
            {
                "attention": name,
                "s per step": spread([one["seconds"] for one in runs]),
                "faster than bool mask": spread([b["seconds"] / a["seconds"] for b, a in paired]),
                "peak MB": spread([one["peak"] / 1e6 for one in runs], 0),
                "tensors of T x T": runs[0]["squares"],
                "largest": "{} MB by {}".format(runs[0]["largest"] // 10**6, runs[0]["by"]),
            }
        )
    title = (
        f"{options.layers} layers, {options.tokens:,} tokens, recompute {options.recompute}; "
        "median (min-max) over rounds"
    )
    report(title, rows, found, options.json)


def measure(way: str, tokens: int, layers: int, recompute: str) -> dict[str, Any]:
    """Two steps forward and backward, the first profiled, the second timed."""
    model = Decoder(
        Architecture(
            model_type="llama",
            vocab_size=1024,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=tokens,
            tie_word_embeddings=True,
        ),
        "varlen" if way == "varlen" else "sdpa",
    ).model
    if recompute == "full":
        apply_activation_checkpointing(model, list(model.layers), "full")
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(tokens, generator=generator) * 0.97 + 5.7).exp().int() + 1
    ids = torch.repeat_interleave(torch.arange(tokens), lengths)[None, :tokens]
    inputs = torch.randint(1024, (1, tokens), generator=generator)

    def step() -> float:
        began = time.perf_counter()
        hidden, _ = model(inputs, cu_seqlens_of(ids))
        hidden.square().mean().backward()
        return time.perf_counter() - began

    def dense(*_: object) -> AttentionDocuments:
        return AttentionDocuments("sdpa", (ids[:, None, :, None] == ids[:, None, None, :]).tril())

    if way == "bool":
        patch("trainer.models.decoder.locate", dense).start()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.events() if event.self_cpu_memory_usage > 0]
    events.sort(key=lambda event: -event.self_cpu_memory_usage)
    by = events[0]
    while by.cpu_parent is not None and "autograd" not in by.cpu_parent.name:
        by = by.cpu_parent
    return {
        "seconds": step(),
        "peak": peak_memory(torch.device("cpu")),
        "largest": events[0].self_cpu_memory_usage,
        "by": by.name,
        "squares": sum(event.self_cpu_memory_usage >= tokens**2 for event in events),
    }


def grid(rounds: int = 9) -> None:
    """Processor time of each way, in turns."""
    torch.set_num_threads(1)
    rows = []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    sizes = ((4, 256), (4, 512), (2, 1024))
    for dtype, (batch, length), document in product(dtypes, sizes, (15, 50, 150, 480)):
        generator = torch.Generator().manual_seed(0)
        begins = torch.rand(batch, length, generator=generator) < 1 / document
        ends = cu_seqlens_of(begins.cumsum(1))
        shapes = [(batch, length, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
        q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
        made: list[float] = []
        took: dict[Any, list[float]] = {"varlen": [], "sdpa": []}
        for _ in range(rounds):
            for way, times in took.items():
                began = time.process_time()
                where = locate(ends, (batch, length), dtype, HEAD_DIM, way)
                located = time.process_time()
                attend(q, k, v, where).sum().backward()
                times.append(1e3 * (time.process_time() - located))
            made.append(1e3 * (located - began))  # of the mask
        loop, mask = median(took["varlen"]), median(took["sdpa"])
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "sequences": f"{batch} x {length:,}",
                "tokens a document": document,
                "loop, ms": f"{loop:.1f}",
                "mask, ms": f"{mask:.1f}",
                "loop / mask": f"{loop / mask:.2f}",
                "to make the mask, ms": f"{median(made):.1f}",
                "auto": choose_attention("auto", dtype, HEAD_DIM, None, length),
            }
        )
    title = (
        f"{HEADS} query and {GROUPS} key/value heads of {HEAD_DIM}, one core; median of {rounds}"
    )
    report(title, rows, rows, None)


if __name__ == "__main__":
    if sys.argv[1:] == ["grid"]:
        grid()
    elif sys.argv[1:2] == ["measure"]:
        way, tokens, layers, recompute = sys.argv[2:]
        print(json.dumps(measure(way, int(tokens), int(layers), recompute)))
    else:
        main()
