"""The table in docs/plan.md: what `perdure plan` says of layouts whose speed others have published.

`python -m benchmarks.published_plans` writes it anew, in some minutes on one core. No constant of
the plan was chosen by it.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.plan import predict
from trainer.plan.blueprint import PlannedModel, read_blueprint
from trainer.plan.costs import USUAL_NODE, PlannedMachine, describe_machine
from trainer.plan.prediction import Prediction
from trainer.plan.search import make_plan
from trainer.recipe import Recipe, RecipeError, load_recipe
from trainer.text import wrapped

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- made by benchmarks/published_plans.py -->\n"
END = "<!-- end of what benchmarks/published_plans.py made -->\n"
NEAR = 0.1
"""How far an estimate may be from what is published without a reason."""
LLAMA = "[Llama 3, table 4](https://arxiv.org/abs/2407.21783v3)"
NVIDIA = "[dgxc-benchmarking v25.04.02](https://github.com/NVIDIA/dgxc-benchmarking/blob/v25.04.02/llama3.1/README.md)"
TITAN = "[torchtitan 2024](https://github.com/pytorch/torchtitan/blob/main/benchmarks/{})"
TITAN_2024 = TITAN.format("llama3_h100_202412_torchtitan.md")
TITAN_2025 = TITAN.replace("2024", "2025").format("asyncTP_llama3_h100_2025-06_torchtitan.md")
TITAN_GPU = {"memory": 96e9, "bandwidth": 2.4e12}
"""As torchtitan's pages describe it."""
TITAN_TFLOPS = 835.0
"""The peak of an H100 NVL. The real one lies between that and 989, say the pages, and no more."""
SLOWER = (
    "torchtitan's GPUs have a limit of 500 W, and an unknown clock. Their peak is taken to be that "
    "of an H100 NVL. NVIDIA's run of the same model (row 6) is 1.6 times as fast"
)


@dataclass(frozen=True)
class Published:
    """One run that somebody has published."""

    model: str
    """The recipe that has its architecture."""
    gpus: int
    seq_len: int
    global_batch: int
    """Sequences."""
    layout: str
    """As it is published."""
    strategy: dict[str, Any]
    """The nearest that this trainer has."""
    speed: float
    """Tokens/s of a GPU, or TFLOP/s, if more than a million."""
    source: str
    micro_batch: int = 1
    gpu: dict[str, Any] = field(default_factory=dict)
    """What of an H100 is different there."""
    tflops: float | None = None
    why: str = ""
    """Known reasons for a difference."""


def _pipeline(ranks: int, per_rank: int) -> dict[str, Any]:
    return {"pp": ranks, "pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": per_rank}


TP8 = {"tp": 8, "sequence_parallel": True}
ZERO2 = {"sharding": "SHARD_GRAD_OP", "activation_checkpointing": "none"}
ZERO3 = {"sharding": "FULL_SHARD"}
TITAN_8B = {**ZERO3, "activation_checkpointing": "selective"}
TABLE = (
    Published(
        "llama3_405b", 8192, 8192, 2048, "TP8 PP16 DP64", {**ZERO2, **TP8, **_pipeline(16, 7)},
        430e12, LLAMA,
    ),
    Published(
        "llama3_405b", 16384, 8192, 2048, "TP8 PP16 DP128", {**ZERO2, **TP8, **_pipeline(16, 7)},
        400e12, LLAMA,
    ),
    Published(
        "llama3_405b", 16384, 131072, 128, "TP8 CP16 PP16 DP8",
        {**ZERO2, **TP8, "cp": 16, **_pipeline(16, 7)}, 380e12, LLAMA,
    ),
    Published(
        "llama3_405b", 1024, 8192, 512, "TP8 PP8x8 CP2 DP8", {**ZERO2, **TP8, **_pipeline(8, 8)},
        211406 / 1024, NVIDIA, why="tp x cp may not span nodes here: the estimate is of CP1 DP16",
    ),
    Published(
        "llama3_70b", 64, 8192, 128, "TP4 PP4x5 CP2 DP2",
        {**ZERO2, **TP8, "tp": 4, "cp": 2, **_pipeline(4, 5)}, 71526 / 64, NVIDIA,
    ),
    Published(
        "llama3_8b", 8, 8192, 128, "CP2 DP4", {**ZERO2, "cp": 2}, 85459 / 8, NVIDIA,
    ),
    Published(
        "llama3_8b", 8, 8192, 16, "FSDP8", TITAN_8B, 6667, TITAN_2024, 2, TITAN_GPU, TITAN_TFLOPS,
        SLOWER,
    ),
    Published(
        "llama3_8b", 128, 8192, 256, "FSDP128", TITAN_8B, 6514, TITAN_2024, 2, TITAN_GPU,
        TITAN_TFLOPS, SLOWER,
    ),
    Published(
        "llama3_70b", 256, 8192, 512, "FSDP32 TP8",
        {**ZERO3, **TP8, "activation_checkpointing": "full"}, 597.3, TITAN_2025, 16, TITAN_GPU,
        TITAN_TFLOPS, "The page compares kinds of tensor parallelism, not layouts",
    ),
)  # fmt: skip


def machine_of(row: Published) -> PlannedMachine:
    """Its nodes, as `perdure plan` takes them."""
    gpus, nodes = f"{USUAL_NODE}xH100", row.gpus // USUAL_NODE
    machine = describe_machine(gpus, nodes, "bf16", tflops=row.tflops)
    return replace(machine, gpu=replace(machine.gpu, **row.gpu))


def recipe_of(row: Published) -> Recipe:
    """Its layout, as a recipe of this trainer."""
    strategy = ", ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in {"name": "fsdp", "compile": True, **row.strategy}.items()
    )
    overrides = {
        "data.seq_len": row.seq_len,
        "data.document_mask": "false",
        "batch.global_batch": row.global_batch,
        "batch.micro_batch": row.micro_batch,
        "strategy": f"{{{strategy}}}",
    }
    path = ROOT / f"recipes/{row.model}.yaml"
    return load_recipe(path, [f"{key}={value}" for key, value in overrides.items()])


def published_speed(row: Published, blueprint: PlannedModel) -> float:
    """Tokens/s of a GPU."""
    return row.speed / blueprint.flops_per_token if row.speed > 1e6 else row.speed


def estimate(row: Published) -> tuple[PlannedModel, Prediction]:
    """Predict the layout of a row.

    Raises:
        RecipeError: this trainer does not have such a layout.
    """
    recipe = recipe_of(row)
    blueprint = read_blueprint(recipe)
    machine = machine_of(row)
    found = predict(
        recipe, row.gpus, USUAL_NODE, machine=machine, device="cuda", blueprint=blueprint
    )
    return blueprint, found


def speed_of(found: Prediction) -> float:
    """Tokens/s of a GPU."""
    assert found.tokens_per_second  # a machine is given
    return found.tokens_per_second / found.world_size


def cell(speed: float, published: float) -> str:
    """An estimate beside what is published."""
    return f"{speed:,.0f} ({speed / published - 1:+.0%})"


def shares_of(found: Prediction) -> str:
    """What else than computing a step is, by the plan."""
    step = found.seconds_per_step or 0.0
    parts = [f"{(found.exposed_seconds or 0.0) / step:.0%} of a step waits for what is sent"]
    parts += [f"{found.bubble:.0%} is bubble"] if found.bubble else []
    return ", ".join(parts)


def row_of(row: Published) -> tuple[list[str], list[str]]:
    """Cells of the table, and reasons."""
    reasons = [row.why] if row.why else []
    name = row.model.replace("llama3_", "").upper()
    batch, found = f"{row.global_batch:,} x {row.seq_len:,}", None
    try:
        blueprint, found = estimate(row)
        theirs = published_speed(row, blueprint)
        here = cell(speed_of(found), theirs)
        fits = found.peak < machine_of(row).gpu.memory
        if not fits:
            here += " \\*"
    except RecipeError as error:
        theirs = published_speed(row, read_blueprint(replace_strategy(row)))
        here = "none"
        reasons.append(f"This trainer refuses the layout: {str(error).split(';')[0]}")
    best = "none"
    try:
        plan = make_plan(asked(row), machine_of(row), "cuda")
        if plan.best:
            chosen = plan.best.prediction
            label = f"{plan.best.label}, {plan.best.recipe.strategy.activation_checkpointing}"
            best = f"{label}: {cell(speed_of(chosen), theirs)}"
            if abs(speed_of(chosen) / theirs - 1) > NEAR:
                why = f"Of the first choice {shares_of(chosen)}"
                recompute = plan.best.recipe.strategy.activation_checkpointing
                if recompute == "full" and speed_of(chosen) < theirs:
                    why += ", and forward is computed twice: without that it does not fit here"
                reasons.append(why)
                if found:
                    reasons.append(f"Of the published layout {shares_of(found)}")
    except RecipeError:
        reasons.append("So many GPUs have more shares of data than sequences in every layout here")
    said = f"{theirs:,.0f}"
    if row.speed > 1e6:
        said += f" ({row.speed / 1e12:.0f} TFLOP/s)"
    cells = [name, f"{row.gpus:,}", batch, row.layout, f"{said}, {row.source}", here, best]
    return cells, reasons


def asked(row: Published) -> Recipe:
    """Its model, batch and length, and no layout."""
    recipe = replace_strategy(row)
    return replace(recipe, batch=replace(recipe.batch, micro_batch="auto"))


def replace_strategy(row: Published) -> Recipe:
    """Without its layout."""
    return recipe_of(replace(row, strategy=ZERO3))


def made() -> str:
    """The table, and the reasons below it."""
    titles = (
        "Llama", "GPUs", "batch", "published layout", "tokens/s of a GPU, source",
        "estimate of that layout", "first choice, and its estimate",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---|--:|---|---|---|---|---|"]
    notes = []
    for number, row in enumerate(TABLE, start=1):
        cells, reasons = row_of(row)
        print(*cells, *reasons, sep="\n  ", flush=True)
        lines.append(f"| {number}. {' | '.join(cells)} |")
        if reasons:
            notes.append(wrapped(f"- Row {number}. {'. '.join(reasons)}."))
    return "\n".join([*lines, "", *notes, ""])


def with_table(page: str, table: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    page = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/plan.md"
    text = with_table(page.read_text(encoding="utf-8"), made())  # which takes minutes
    page.write_text(text, encoding="utf-8")
