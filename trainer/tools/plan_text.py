"""Formats a `Plan` as text and as JSON."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from trainer.parallel.mesh import placement
from trainer.plan import costs
from trainer.plan.prediction import HOW
from trainer.plan.search import ROOM, Plan, PlanCandidate
from trainer.recipe import StrategySection
from trainer.recipe.strategies import sizes
from trainer.text import table

COLUMN_SOURCES = {
    "activ": "trace",
    **dict.fromkeys(("params", "grads", "optim", "host", "comm"), "shapes"),
    **dict.fromkeys(("peak", "transient"), "both"),
    "bubble": "simulation",
    **dict.fromkeys(("s/step", "MFU", "hours", "cost", "hidden"), "roofline"),
}
"""Column → origin of its figures, described in `prediction.HOW`."""
WIDTH = 120
"""Columns of text. Commands are not wrapped, so that they can be pasted."""
PEAK_PHASES = {
    "forward": "when the loss is computed",
    "head": "in the backward pass of the output head",
    "blocks": "in the backward pass of a block",
    "end": "in the backward pass below the blocks",
    "reduce": "when the embedding's gradients are reduced",
    "update": "in the optimizer step",
}


def plan_text(
    plan: Plan, command: str, *, everything: bool = False, price: float | None = None
) -> str:
    """Format a plan: tables, recommendation, and the assumptions behind the figures.

    Args:
        command: `perdure train RECIPE …`, to which overrides are added.
        everything: show every micro-batch and way to reduce, rather than the best ones only.
        price: price of one GPU for an hour, in any currency.
    """
    shown = plan.tried if everything else plan.candidates
    rows = _merged(shown)
    merged = len(rows) < len(shown)
    # The recipe as written comes first, unless a candidate equals it.
    if not any(plan.own is candidate for candidate in plan.candidates):
        rows.insert(0, ([plan.own.label], plan.own))
    parts = [
        _headline(plan),
        _table([_what_it_takes(labels, row, plan, price) for labels, row in rows]),
        "In GB: memory of a rank, host memory of a node, and what a rank sends in a step:",
        _table([_where_it_goes(labels, row, plan) for labels, row in rows]),
        _advice(plan, command, price),
        _notes(plan, merged=merged),
    ]
    if plan.refused:
        # inserted after the tables, before the advice
        parts.insert(4, _fill(f"The recipe as written cannot run there: {plan.refused}."))
    return "\n\n".join(parts)


def _merged(candidates: Sequence[PlanCandidate]) -> list[tuple[list[str], PlanCandidate]]:
    """Group candidates with equal figures, which are frequent on one GPU: (labels, candidate)
    pairs."""
    groups: list[tuple[list[str], PlanCandidate]] = []
    for candidate in candidates:
        label = candidate.label.replace(", ", " +").removesuffix(" offload")  # ZeRO-3 +CPU
        for labels, first in groups:
            if _figures(candidate) == _figures(first):
                labels.append(label)
                break
        else:
            groups.append(([label], candidate))
    return groups


def _figures(candidate: PlanCandidate) -> tuple[object, ...]:
    strategy = candidate.recipe.strategy
    return strategy.activation_checkpointing, strategy.reduce_every_pass, candidate.prediction


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    # without columns that have no figures
    columns = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    cells = [columns, *([row[name] for name in columns] for row in rows)]
    # the first two columns are words: strategy and recomputation
    lines = table(cells, right=range(2, len(columns)))
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _headline(plan: Plan) -> str:
    recipe, millions = plan.recipe, plan.blueprint.parameter_count / 1e6
    count = f"{millions:,.1f} M" if millions < 100 else f"{millions / 1e3:.2f} B"
    if (trained := plan.blueprint.trained_count) < plan.blueprint.parameter_count:
        count = f"{trained / 1e6:,.1f} M of {count}"
    return _fill(
        f"{count} parameters in {recipe.precision.dtype}, "
        f"{recipe.batch.global_batch} sequences of {recipe.data.seq_len:,} tokens per step, "
        f"{recipe.run.length}, on {_machine(plan)}; 1 GB = 10^9 bytes:"
    )


def _machine(plan: Plan) -> str:
    machine = plan.machine
    kind = "CPU rank(s)" if plan.recipe.run.device == "cpu" else "GPU(s)"
    ranks = f"{machine.gpus_per_node} {kind} with {machine.gpu.memory / 1e9:.4g} GB"
    return ranks if machine.nodes == 1 else f"{machine.nodes} nodes of {ranks}"


def _name(labels: Sequence[str], candidate: PlanCandidate) -> dict[str, str]:
    p, strategy = candidate.prediction, candidate.recipe.strategy
    between = " … " if len(labels) > 2 else ", "
    return {
        "strategy": between.join(dict.fromkeys((labels[0], labels[-1]))),
        "recompute": strategy.activation_checkpointing,
        "micro-batch": f"{p.micro_batch} x {p.passes}"
        + (" (r)" if strategy.reduce_every_pass else ""),
    }


def _what_it_takes(
    labels: Sequence[str], candidate: PlanCandidate, plan: Plan, price: float | None
) -> dict[str, str]:
    p = candidate.prediction
    free, fits = candidate.free(plan.machine), candidate.lacking(plan.machine)
    if fits in ("", "over"):
        fits = f"{_gb(abs(free))} {fits or 'free'}"
    name, bill = _name(labels, candidate), _run_costs(candidate, plan, price)
    if candidate is plan.best:
        name["strategy"] += " *"
    return {
        **name,
        "peak": _gb(p.peak),
        "fits": fits,
        "bubble": f"{p.bubble:.0%}" if p.bubble_formula else "-",
        "s/step": f"{p.seconds_per_step:.3g}",
        "MFU": f"{p.mfu:.0%}",
        "hours": _count(bill["hours"]) if bill else "-",
        "cost": _count(bill["cost"]) if "cost" in bill else "-",
    }


def _where_it_goes(labels: Sequence[str], candidate: PlanCandidate, plan: Plan) -> dict[str, str]:
    p, hidden = candidate.prediction, "-"
    if moving := (p.communication_seconds or 0.0) + (p.transfer_seconds or 0.0):
        hidden = f"{max(0.0, 1 - (p.exposed_seconds or 0.0) / moving):.0%}"
    return {
        **_name(labels, candidate),
        "params": _gb(p.parameters),
        "grads": _gb(p.gradients),
        "optim": _gb(p.optimizer_state),
        "activ": _gb(p.activations),
        "transient": _gb(p.transient),
        "host": _gb(p.node_memory),
        "comm": _gb(p.communication_bytes) if plan.machine.world_size > 1 else "-",
        "hidden": hidden,
    }


def _run_costs(candidate: PlanCandidate, plan: Plan, price: float | None) -> dict[str, float]:
    """Hours and GPU hours of a whole run without interruptions, and its cost if there is a price;
    {} if the recipe has only a number of epochs."""
    if not plan.recipe.run.steps:
        return {}
    hours = plan.recipe.run.steps * (candidate.prediction.seconds_per_step or 0.0) / 3600
    bill = {"hours": hours, "gpu_hours": hours * plan.machine.world_size}
    return bill if price is None else bill | {"cost": price * bill["gpu_hours"]}


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}" if count < 10e9 else f"{count / 1e9:.0f}"


def _advice(plan: Plan, command: str, price: float | None) -> str:
    best = plan.best
    if best is None:
        least = min(plan.candidates, key=lambda c: c.prediction.peak)
        text = (
            f"Nothing fits with {ROOM:.0%} room. {least.label} with recompute "
            f"{least.recipe.strategy.activation_checkpointing} needs least: "
            f"{_gb(least.prediction.peak)} GB, most of it "
            f"{PEAK_PHASES[least.prediction.peak_phase]}, and on each node {_node(least)}. "
        )
        cure = "Use larger GPUs, shorter sequences (data.seq_len), or a smaller model."
        return _fill(text + (_more_nodes(plan) if plan.enough_nodes else cure))
    p, settings = best.prediction, recommended(best)
    size = settings["batch"]["micro_batch"]
    strategy = [f"{key}: {_yaml(value)}" for key, value in settings["strategy"].items()]
    yaml = ["batch:", f"  micro_batch: {size}", "strategy:", *(f"  {line}" for line in strategy)]
    flow = f"strategy={{{', '.join(strategy)}}}"
    overrides = shlex.join([f"batch.micro_batch={size}", flow])
    return "\n".join(
        [
            _fill(
                f"* Fastest that fits with {ROOM:.0%} room: {best.label}, recompute "
                f"{best.recipe.strategy.activation_checkpointing}. It needs most "
                f"{PEAK_PHASES[p.peak_phase]}: {_gb(p.peak)} GB of "
                f"{plan.machine.gpu.memory / 1e9:.4g}, "
                f"and on each node {_node(best)}."
            ),
            _whole_run(plan, best, price),
            *map(_fill, _placements(plan, best)),
            *map(_fill, _pipeline(best)),
            *map(_fill, _remarks(plan)),
            "In the recipe:",
            "",
            *(f"    {line}" for line in yaml),
            "",
            f"or: {command} {overrides}",
        ]
    )


def _whole_run(plan: Plan, best: PlanCandidate, price: float | None) -> str:
    bill = _run_costs(best, plan, price)
    if not bill:
        return _fill(f"{plan.recipe.run.length}: hours are unknown, as the data are not here.")
    cost = f", which cost {_count(bill['cost'])} at {price:g} each" if "cost" in bill else ""
    reference = " the reference (forward once over all pairs, at the first start),"
    once = reference if plan.recipe.objective.referenced else ""
    return _fill(
        f"run.steps={plan.recipe.run.steps} then takes {_count(bill['hours'])} hours: "
        f"{_count(bill['gpu_hours'])} GPU hours{cost}. Starts,{once} validation and failures come "
        "on top."
    )


def _remarks(plan: Plan) -> list[str]:
    if plan.enough_nodes:
        return [_more_nodes(plan)]
    fitting = [c for c in (plan.own, *plan.candidates) if c.fits(plan.machine)]
    fastest = min(c.prediction.seconds_per_step or 0.0 for c in fitting)
    best = (plan.best and plan.best.prediction.seconds_per_step) or 0.0
    if fastest < best:
        return [f"Offload would save {1 - fastest / best:.1%} of the time: too little to rely on."]
    return []


def _placements(plan: Plan, best: PlanCandidate) -> list[str]:
    """Describe which ranks share a node and what crosses nodes, for the recipe as written and for
    the best candidate."""
    lines, machine = [], plan.machine
    for what, candidate in (("of the recipe as it is", plan.own), (f"of {best.label}", best)):
        refused = candidate is plan.own and bool(plan.refused or plan.own is best)
        if not refused and max(sizes(candidate.recipe.strategy).values()) > 1:
            where = placement(candidate.recipe, machine.world_size, machine.gpus_per_node)
            lines.append(f"Placement {what}: {where}.")
    return lines


def _pipeline(candidate: PlanCandidate) -> list[str]:
    p = candidate.prediction
    if not p.bubble_formula:  # no pipeline
        return []
    return [
        f"Its ranks wait {p.bubble:.1%} of the time for each other ({p.bubble_formula:.1%} if all "
        f"stages cost the same), and {p.exposed_seconds:.2g} s of a step for messages."
    ]


def _node(candidate: PlanCandidate) -> str:
    p = candidate.prediction
    disk = f" and {_gb(p.node_disk)} GB of local disk" if p.node_disk else ""
    return f"{_gb(p.node_memory)} GB of host memory{disk}"


def _more_nodes(plan: Plan) -> str:
    return f"On {plan.enough_nodes} such nodes ZeRO-3 with full recomputation fits without offload."


def recommended(candidate: PlanCandidate) -> dict[str, Any]:
    """Recipe sections of a candidate: the batch's micro_batch, and the strategy without its
    defaults."""
    strategy = {
        field.name: value
        for field in dataclasses.fields(StrategySection)
        if (value := getattr(candidate.recipe.strategy, field.name)) != field.default
        or field.name == "name"
    }
    return {"batch": {"micro_batch": candidate.recipe.batch.micro_batch}, "strategy": strategy}


def _yaml(value: Any) -> str:
    # JSON is YAML, so it can quote all other values.
    plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    return value if plain else json.dumps(value)


def _notes(plan: Plan, *, merged: bool) -> str:
    p, machine, recipe = plan.own.prediction, plan.machine, plan.recipe
    slots = recipe.checkpoint.slots
    copies = f"checkpoint.slots: up to {slots}, as memory allows" if slots else "while it is saved"
    lines = [f"Checkpoint: {_gb(p.checkpoint_bytes)} GB"]
    if p.checkpoint_seconds:
        rate = (machine.storage or 0) / 1e9
        lines[0] += f", written in {p.checkpoint_seconds:.1f} s at {rate:g} GB/s beside training"
    lines += assumptions(plan)
    if recipe.strategy.compile:
        lines.append(
            "strategy.compile: activations are those of eager kernels; compiled ones keep fewer. "
            "Seconds are those of blocks whose element-wise kernels are fused."
        )
    if merged:
        lines.append("A … B: these strategies and those between them have the same figures.")
    lines.append(
        "(r): with strategy.reduce_every_pass. host: memory of a node, for what is offloaded and "
        f"a copy of a checkpoint ({_gb(p.slot_bytes)} GB; {copies}). comm: sent by each rank per "
        "step. hidden: share of the time of communication, and of transfers to and on the host, "
        "that overlaps with computation."
    )
    return "\n".join(map(_fill, lines))


def _fill(text: str) -> str:
    return fill(text, WIDTH, break_on_hyphens=False)


def assumptions(plan: Plan) -> list[str]:
    """Sentences about the assumptions behind the figures."""
    machine = plan.machine
    columns = {
        source: ", ".join(name for name, origin in COLUMN_SOURCES.items() if origin == source)
        for source in dict.fromkeys(COLUMN_SOURCES.values())
    }
    lines = [
        "Where figures come from: "
        + "; ".join(f"{names}: {source}" for source, names in columns.items())
        + ".",
        "shapes: computed from those of the parameters. trace: one pass on fake tensors. both: the "
        "tensors of a pass are traced, the rest is computed. roofline: both, over these speeds:",
        f"{machine.peak_flops / 1e12:g} TFLOP/s and "
        f"{machine.gpu.bandwidth / 1e12:g} TB/s per GPU (matrix products reach "
        f"{costs.PEAK_SHARE:.0%}, attention {machine.gpu.attention:.0%}, other kernels "
        f"{costs.BANDWIDTH_SHARE:.0%}), "
        f"{machine.gpu.link / 1e9:g} GB/s to a GPU of the same node"
        + (f", {machine.net / 1e9:g} GB/s between nodes" if machine.nodes > 1 else "")
        + f" (collectives reach {costs.NETWORK_SHARE:.0%}), {machine.gpu.pcie / 1e9:g} GB/s to the "
        f"host ({costs.PAGEABLE_SHARE:.0%} of it where memory is not pinned); a node updates "
        f"offloaded state at {costs.HOST_BANDWIDTH / 1e9:g} GB/s; its disk reads and writes "
        f"{costs.DISK_BANDWIDTH / 1e9:g} GB/s, none of it cached in memory; nothing "
        "waits for data.",
        f"A collective costs {machine.call * 1e6:g} us and {machine.hop * 1e6:g} us for each step "
        f"inside a node"
        + (f", {machine.hop_between * 1e6:g} us between nodes" if machine.nodes > 1 else "")
        + f"; what is computed beside it is {costs.TAKEN_SHARE:.0%} slower. A kernel costs its "
        f"host {machine.launch * 1e6:g} us.",
        "Peaks leave out what torch, CUDA and NCCL take for themselves, and fragmentation.",
    ]
    if machine.note:
        lines.append(machine.note)
    return lines


def plan_json(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """All figures as JSON values, in bytes, seconds and hours; `cost` only if there is a price."""

    def candidate_json(candidate: PlanCandidate) -> dict[str, Any]:
        return {
            "label": candidate.label,
            **recommended(candidate),
            **dataclasses.asdict(candidate.prediction),
            **_run_costs(candidate, plan, price),
            "free": candidate.free(plan.machine),
            "fits": candidate.fits(plan.machine),
            "lacking": candidate.lacking(plan.machine),
        }

    return {
        "machine": dataclasses.asdict(plan.machine),
        "parameter_count": plan.blueprint.parameter_count,
        "trained_count": plan.blueprint.trained_count,
        "how": HOW,
        "assumptions": assumptions(plan),
        "room": ROOM,
        "own": candidate_json(plan.own),
        "refused": plan.refused,
        "candidates": [candidate_json(candidate) for candidate in plan.candidates],
        "tried": [candidate_json(candidate) for candidate in plan.tried],
        "best": candidate_json(plan.best) if plan.best else None,
        "enough_nodes": plan.enough_nodes,
    }
