"""A `Plan` as text and as JSON."""

import dataclasses
import json
import re
import shlex
from textwrap import fill
from typing import Any

from trainer.plan import costs
from trainer.plan.prediction import HOW
from trainer.plan.search import ROOM, Candidate, Plan
from trainer.recipe import Strategy
from trainer.text import table

COLUMNS = {
    "strategy": "",
    "recompute": "",
    "micro-batch": "",
    "params": "shapes",
    "grads": "shapes",
    "optim": "shapes",
    "activ": "trace",
    "transient": "both",
    "peak GB": "both",
    "fits": "",
    "host GB": "shapes",
    "comm GB": "shapes",
    "hidden": "roofline",
    "bubble": "simulation",
    "s/step": "roofline",
    "MFU": "roofline",
}
"""Columns of the table, each with where its figures come from, as `prediction.HOW` says."""
MOMENTS = {
    "forward": "when the loss is computed",
    "head": "in the backward pass of the output head",
    "blocks": "in the backward pass of a block",
    "end": "in the backward pass below the blocks",
    "reduce": "when the embedding's gradients are reduced",
    "update": "in the optimizer step",
}


def plan_text(plan: Plan, command: str, *, everything: bool = False) -> str:
    """The table, the recommendation, and what it rests on.

    Args:
        plan: to print.
        command: `perdure train RECIPE …`, to which overrides are added.
        everything: a line for each micro-batch and way to reduce, not for the best ones alone.
    """
    shown = plan.tried if everything else plan.candidates
    own = [] if any(plan.own is candidate for candidate in plan.candidates) else [plan.own]
    rows = [_row(candidate, plan) for candidate in (*own, *shown)]
    lines = table([tuple(COLUMNS), tuple(COLUMNS.values()), *rows], right=range(2, len(COLUMNS)))
    lines.insert(2, "-" * max(map(len, lines[:2])))
    parts = [_headline(plan), "\n".join(lines), _advice(plan, command), _notes(plan)]
    if plan.refused:
        parts.insert(2, f"As it is the recipe cannot run there: {plan.refused}.")
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    recipe, millions = plan.recipe, plan.blueprint.parameter_count / 1e6
    count = f"{millions:,.1f} M" if millions < 100 else f"{millions / 1e3:.2f} B"
    return (
        f"{count} parameters in {recipe.precision.dtype}, "
        f"{recipe.batch.global_batch} sequences of {recipe.data.seq_len:,} tokens per step, "
        f"on {_machine(plan)}; per rank, 1 GB = 10^9 bytes:"
    )


def _machine(plan: Plan) -> str:
    machine = plan.machine
    kind = "CPU rank(s)" if plan.recipe.run.device == "cpu" else "GPU(s)"
    ranks = f"{machine.gpus_per_node} {kind} with {machine.gpu.memory / 1e9:.4g} GB"
    return ranks if machine.nodes == 1 else f"{machine.nodes} nodes of {ranks}"


def _row(candidate: Candidate, plan: Plan) -> tuple[str, ...]:
    p, strategy = candidate.prediction, candidate.recipe.strategy
    free, fits = candidate.free(plan.machine), candidate.lacking(plan.machine)
    if fits in ("", "over"):
        fits = f"{_gb(abs(free))} {fits or 'free'}"
    hidden = "-"
    if moving := (p.communication_seconds or 0.0) + (p.transfer_seconds or 0.0):
        hidden = f"{max(0.0, 1 - (p.exposed_seconds or 0.0) / moving):.0%}"
    label = candidate.label
    if strategy.reduce_every_pass:
        label += " (r)"
    return (
        label + (" *" if candidate is plan.best else ""),
        strategy.activation_checkpointing,
        f"{p.micro_batch} x {p.passes}",
        *map(_gb, (p.parameters, p.gradients, p.optimizer_state, p.activations, p.transient)),
        _gb(p.peak),
        fits,
        _gb(p.node_memory),
        _gb(p.communication_bytes),
        hidden,
        f"{p.bubble:.0%}" if strategy.pp > 1 else "-",
        f"{p.seconds_per_step:.3g}",
        f"{p.mfu:.0%}",
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}" if count < 10e9 else f"{count / 1e9:.0f}"


def _advice(plan: Plan, command: str) -> str:
    best = plan.best
    if best is None:
        least = min(plan.candidates, key=lambda c: c.prediction.peak)
        lines = [
            f"Nothing fits with {ROOM:.0%} room. {least.label} with recompute "
            f"{least.recipe.strategy.activation_checkpointing} needs least: "
            f"{_gb(least.prediction.peak)} GB, most of it "
            f"{MOMENTS[least.prediction.moment]}, and on each node {_node(least)}."
        ]
        if plan.enough_nodes:
            lines.append(_more_nodes(plan))
        else:
            lines.append("Take larger GPUs, shorter sequences (data.seq_len), or a smaller model.")
        return " ".join(lines)
    p = best.prediction
    settings = recommended(best)
    yaml = [
        "batch:",
        f"  micro_batch: {settings['batch']['micro_batch']}",
        "strategy:",
        *(f"  {key}: {_yaml(value)}" for key, value in settings["strategy"].items()),
    ]
    flow = ", ".join(f"{key}: {_yaml(value)}" for key, value in settings["strategy"].items())
    overrides = shlex.join(
        [f"batch.micro_batch={settings['batch']['micro_batch']}", f"strategy={{{flow}}}"]
    )
    return "\n".join(
        [
            f"* Fastest that fits with {ROOM:.0%} room: {best.label}, recompute "
            f"{best.recipe.strategy.activation_checkpointing}. It needs most "
            f"{MOMENTS[p.moment]}: {_gb(p.peak)} GB of {plan.machine.gpu.memory / 1e9:.4g}, and on "
            f"each node {_node(best)}.",
            *_pipeline(best),
            *_remarks(plan),
            "In the recipe:",
            "",
            *(f"    {line}" for line in yaml),
            "",
            f"or: {command} {overrides}",
        ]
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


def _pipeline(candidate: Candidate) -> list[str]:
    p, strategy = candidate.prediction, candidate.recipe.strategy
    if strategy.pp == 1:
        return []
    return [
        f"Its ranks wait {p.bubble:.1%} of the time for each other ({p.bubble_formula:.1%} if all "
        f"stages cost the same), and {p.exposed_seconds:.2g} s of a step for messages."
    ]


def _node(candidate: Candidate) -> str:
    p = candidate.prediction
    disk = f" and {_gb(p.node_disk)} GB of local disk" if p.node_disk else ""
    return f"{_gb(p.node_memory)} GB of host memory{disk}"


def _more_nodes(plan: Plan) -> str:
    return f"On {plan.enough_nodes} such nodes ZeRO-3 with full recomputation fits without offload."


def recommended(candidate: Candidate) -> dict[str, Any]:
    """Recipe sections: the batch's micro_batch, and the whole strategy without its defaults."""
    strategy = {
        field.name: value
        for field in dataclasses.fields(Strategy)
        if (value := getattr(candidate.recipe.strategy, field.name)) != field.default
        or field.name == "name"
    }
    return {
        "batch": {"micro_batch": candidate.recipe.batch.micro_batch},
        "strategy": strategy,
    }


def _yaml(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    return value if plain else json.dumps(value)


def _notes(plan: Plan) -> str:
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
            "strategy.compile: figures are those of eager kernels; compiled ones keep fewer "
            "activations and take less time."
        )
    lines.append(
        "(r): with strategy.reduce_every_pass. host: memory of a node, for what is offloaded and "
        f"a copy of a checkpoint ({_gb(p.slot_bytes)} GB; {copies}). comm: sent by each rank per "
        "step. hidden: share of the time of that, and of transfers to and on the host, that lies "
        "beside computation."
    )
    return "\n".join(fill(line, 120) for line in lines)


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on, one sentence each."""
    machine = plan.machine
    lines = [
        "shapes: computed from those of the parameters. trace: one pass on fake tensors. both: "
        "what a pass works with is traced, the rest computed. roofline: both, over these speeds:",
        f"{machine.peak_flops / 1e12:g} TFLOP/s and "
        f"{machine.gpu.bandwidth / 1e12:g} TB/s per GPU (matrix products reach "
        f"{costs.PEAK_SHARE:.0%}, other kernels {costs.BANDWIDTH_SHARE:.0%}), "
        f"{machine.gpu.link / 1e9:g} GB/s to a GPU of the same node"
        + (f", {machine.net / 1e9:g} GB/s between nodes" if machine.nodes > 1 else "")
        + f" (rings reach {costs.NETWORK_SHARE:.0%}), {machine.gpu.pcie / 1e9:g} GB/s to the host "
        f"({costs.PAGEABLE_SHARE:.0%} of it where memory is not pinned); a node updates offloaded "
        f"state at {costs.HOST_BANDWIDTH / 1e9:g} GB/s; its disk reads and writes "
        f"{costs.DISK_BANDWIDTH / 1e9:g} GB/s, none of it cached in memory; nothing "
        "waits for data or launches.",
        "Peaks leave out what torch, CUDA and NCCL take for themselves, and fragmentation.",
    ]
    if machine.note:
        lines.append(machine.note)
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """All figures: bytes, seconds."""

    def candidate_json(candidate: Candidate) -> dict[str, Any]:
        return {
            "label": candidate.label,
            **recommended(candidate),
            **dataclasses.asdict(candidate.prediction),
            "free": candidate.free(plan.machine),
            "fits": candidate.fits(plan.machine),
            "lacking": candidate.lacking(plan.machine),
        }

    return {
        "machine": dataclasses.asdict(plan.machine),
        "parameter_count": plan.blueprint.parameter_count,
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
