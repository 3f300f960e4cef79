"""Model parallelism, measured, in two cases.

`step`: CPU seconds of a step (forward, backward, AdamW) on two ranks under tensor, sequence,
pipeline and context parallelism, beside torch's own: DTensor styles, pipelining, and for a ring,
as torch's has no way for the CPU, keys that are gathered; and beside torchtitan, where it is
installed and can. All compute an untied Llama of the quickstart's size, on the same tokens from the
same weights, in the same processes, in turn; a pipeline has the same cut, micro-batches and order.
Seconds are user and system time of all threads of both ranks, so what else the machine does counts
little.

`ring-memory`: what a rank of a ring holds of a sequence. A Llama of 1 block (hidden 64, 2 query
heads and 1 key head of 32, vocabulary 1,024) in float32 computes loss and gradients of one sequence
on 1, 2 and 4 ranks under context parallelism. Documents have 8,192 tokens each, so that it ends in
minutes on a CPU; what is held does not depend on them. Memory is the growth of a rank's resident
set, at its largest, over that with the model built and the data drawn.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support import QUICKSTART, arguments, report, run, torchrun
from elastic.world import World, join_world, leave_world
from trainer.data.packing import cu_seqlens_of
from trainer.models import Decoder, init_parameter
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer, set_rate
from trainer.parallel.context import ContextParallel
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.parallel.passes import means
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.architecture import Architecture
from trainer.run.join import keep_freed_memory
from trainer.run.speed import peak_memory

DOCUMENT = 8192
WARM_UP = 2
"""Steps that do not count."""
_FOUR = ("batch.global_batch=4", "batch.micro_batch=4")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2": ("strategy.tp=2", *_FOUR),
    "tp2+sp": ("strategy.tp=2", "strategy.sequence_parallel=true", *_FOUR),
    "pp2, 8 x 256 tokens": ("strategy.pp=2", "batch.global_batch=8", "batch.micro_batch=1"),
    "pp2, 4 x 1,024": ("strategy.pp=2", "batch.global_batch=16", "batch.micro_batch=4"),
    "cp2": ("strategy.cp=2", "batch.global_batch=1", "batch.micro_batch=1", "data.seq_len=1024"),
}
OURS, TORCHS, TITANS = "ours", "torch", "torchtitan"


def main() -> None:
    options = arguments(__doc__ or "", case="all", tokens=65536, steps=12)
    cases = {"step": step_times, "ring-memory": ring_memory}
    chosen = cases if options.case == "all" else {options.case: cases.get(options.case)}
    if options.json and len(chosen) > 1:
        sys.exit("--json: is for one --case")
    for name, case in chosen.items():
        if case is None:
            sys.exit(f"--case: there is no {name!r}; it is all, {' or '.join(cases)}")
        case(options)


# --- steps -----------------------------------------------------------------------------------


def step_times(options: Any) -> None:
    """The case `step`."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        worker = ("-m", "benchmarks.parallelism", "step", layout, str(options.steps))
        output = run(torchrun(2, *worker), Path.cwd())
        found[layout] = json.loads(output.splitlines()[-1])
    rows = [
        {
            "layout": layout,
            "CPU s a step": f"{one[OURS]:.3f}",
            "beside": peer,
            "its": f"{one[peer]:.3f}" if peer in one else "-",
            "ratio": f"{one[OURS] / one[peer]:.3f}" if peer in one else "-",
            "loss, relative difference": f"{one['differences'][peer]:.0e}" if peer in one else "-",
            "note": note,
        }
        for layout, one in found.items()
        for peer, note in one["notes"].items()
    ]
    report("CPU seconds of a step on two ranks, both together", rows, found, options.json)
    if not titan_version():
        print("\ntorchtitan is left out: it is not installed")


def titan_version() -> str:
    """The version of torchtitan that is installed, or nothing."""
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return ""


def measure_steps(layout: str, count: int) -> None:
    """Prints what a step took of both. On all ranks."""
    world = join_world("cpu", 600)
    keep_freed_memory()  # as ranks of this trainer do, here for both
    plain = ("model.architecture.model_type=llama", "model.architecture.tie_word_embeddings=false")
    alike = ("optimizer={lr: 1e-3, weight_decay: 0}", "strategy.zero=2")
    recipe = load_recipe(str(QUICKSTART), [*plain, *alike, *LAYOUTS[layout]])
    step = {OURS: our_step(recipe, world)}
    step[TORCHS], note = torchs_step(recipe, layout)
    notes = {TORCHS: note}
    if titan_version():
        notes[TITANS] = titan_version()
        try:
            step[TITANS], note = titans_step(recipe)
            notes[TITANS] += f", {note}"
        except RuntimeError as error:
            notes[TITANS] += f" has no step here: {error}"
    taken: dict[str, list[float]] = {who: [] for who in step}
    differences = dict.fromkeys(step, 0.0)
    turns = list(step)
    for number in range(WARM_UP + count):
        batches, losses = micro_batches(recipe, number), {}
        for who in turns:
            began = time.process_time()
            losses[who] = step[who](batches).item()
            taken[who].append(time.process_time() - began)
        turns.append(turns.pop(0))  # each is first as often as the others
        for who, loss in losses.items():  # a stage without the loss has none
            differences[who] = max(differences[who], abs(losses[OURS] - loss) / max(loss, 1e-9))
    told = {who: (median(taken[who][WARM_UP:]), differences[who]) for who in step}
    ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(ranks, told)
    if world.is_main:
        seconds = {who: sum(rank[who][0] for rank in ranks) for who in step}
        most = {who: max(rank[who][1] for rank in ranks) for who in step if who != OURS}
        print(json.dumps({**seconds, "differences": most, "notes": notes}))
    leave_world(0)


def micro_batches(recipe: Recipe, number: int) -> Sequence[Mapping[str, Tensor]]:
    """Those of a step: `input_ids` and `labels`, (B, T)."""
    architecture = architecture_of(recipe)
    generator = torch.Generator().manual_seed(number)
    shape = (recipe.batch.global_batch, recipe.data.seq_len + 1)
    tokens = torch.randint(architecture.vocab_size, shape, generator=generator)
    pairs = zip(
        tokens[:, :-1].split(recipe.micro_batch), tokens[:, 1:].split(recipe.micro_batch),
        strict=True,
    )  # fmt: skip
    return [{"input_ids": ids.contiguous(), "labels": labels.contiguous()} for ids, labels in pairs]


def architecture_of(recipe: Recipe) -> Architecture:
    """The model's architecture, which the recipe has."""
    assert recipe.model.architecture
    return recipe.model.architecture


def our_step(recipe: Recipe, world: World) -> Any:
    """A step of the trainer's own parts, without what it tells and checks."""
    architecture = architecture_of(recipe)
    with torch.device("meta"):
        whole = Decoder(architecture)
    mesh = build_mesh(recipe, world)
    fill = partial(init_parameter, architecture=architecture, seed=0)
    model = parallelize(whole, [*whole.blocks], mesh, recipe, world.device, fill)
    model.draw_weights()
    optimizer = build_optimizer(model.optimized, recipe.optimizer)
    set_rate(optimizer, recipe.optimizer.lr)

    def step(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = torch.zeros(())

        for forward in model.run(batches, train=True):
            found = forward(batches[forward.number])
            if isinstance(found, dict):
                loss = found["loss"] / len(batches)
                total.add_(loss.detach())
                forward.root = loss
        model.collect_gradients()
        update(optimizer, model.portions(optimizer), 1.0)
        model.zero_gradients()
        return total

    return step


def torchs_step(recipe: Recipe, layout: str) -> tuple[Any, str]:
    """A step of torch's own parts, and what they are."""
    from benchmarks.peers import torch_layouts as peers

    lr = recipe.optimizer.lr
    model = partial(drawn, recipe)
    if recipe.strategy.tp > 1:
        sequence = recipe.strategy.sequence_parallel
        return peers.tensor_parallel(model(), lr, sequence), "DTensor styles, loss_parallel"
    if recipe.strategy.pp > 1:
        return peers.pipeline(model(), lr, recipe), "Schedule1F1B"
    try:
        step = peers.context_by_torch(model(), lr)
        step(micro_batches(recipe, 0))
        return peers.context_by_torch(model(), lr), "context_parallel"
    except RuntimeError as error:
        why = " ".join(str(error).split())[:80]
        return peers.context_by_gathering(model(), lr), f"gathered keys; context_parallel: {why}"


def titans_step(recipe: Recipe) -> tuple[Any, str]:
    """A step of torchtitan's parts, and what they are.

    Raises:
        RuntimeError: the layout has no way for the CPU, as a step that was tried shows.
    """
    from benchmarks.peers.torchtitan_loop import layout_step

    layout_step(recipe, drawn(recipe))(micro_batches(recipe, 0))
    note = "also FSDP2, over one rank"
    if recipe.strategy.pp > 1:
        note += "; 1F1B, called with the batch whole as torch 2.13 wants it"
    return layout_step(recipe, drawn(recipe)), note


def drawn(recipe: Recipe) -> Decoder:
    """The whole model with the weights that `our_step` begins from."""
    architecture = architecture_of(recipe)
    whole = Decoder(architecture)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(init_parameter(name, tuple(parameter.shape), architecture, 0))
    return whole


# --- memory of a ring ------------------------------------------------------------------------


def ring_memory(options: Any) -> None:
    """The case `ring-memory`."""
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
        loss = ContextParallel(group)(model, inputs)
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
    elif sys.argv[1:2] == ["step"]:
        measure_steps(sys.argv[2], int(sys.argv[3]))
    else:
        main()
