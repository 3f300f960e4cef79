"""Drafts a recipe for `perdure init`: sizes from the data, the strategy from the planner, and a
reason at each key."""

from pathlib import Path
from typing import Any

import jinja2
import yaml

from trainer.data.shards import DataError, read_index
from trainer.models.hf import read_config
from trainer.plan.costs import describe_machine, listed_name
from trainer.plan.search import Plan, make_plan
from trainer.recipe import Recipe, RecipeError, shipped_recipes, validate
from trainer.recipe.load import yaml_scalar
from trainer.tools.plan_text import recommended

LONGEST, SHORTEST = 4096, 128
"""Bounds of the sequence length in tokens; the model may lower them."""
SEQUENCES = 1024
"""Least number of sequences in an epoch, which limits the sequence length above SHORTEST."""
LARGEST_BATCH, SMALLEST_BATCH = 256, 8
STEPS = 100
"""Least number of steps in an epoch, which limits the global batch above SMALLEST_BATCH."""
PADDED = 128
"""Multiple to which the vocabulary size is rounded up, for tensor cores and for sharding."""
CPU = "cpu"


def draft(model: str, data: str, gpus: str, nodes: int, file: str) -> str:
    """Return the text of a recipe.

    Args:
        model: Hugging Face directory, or name of a shipped recipe with an architecture.
        data: directory of prepared data.
        gpus: GPUs of a node in the notation of `perdure plan`, or CPU.
        nodes: number of nodes.
        file: path of the recipe; the run directory gets the same name.

    Raises:
        RecipeError, DataError, ModelConfigError: a choice is impossible; the message has the
        remedy.
    """
    index, template = _index(data), _model(model)
    cpu = gpus == CPU
    dtype, machine = "fp32", None
    if not cpu:
        machine = describe_machine(gpus, nodes, dtype := "bf16")
        if not machine.gpu.flash_attention:  # such a GPU has no tensor cores for bf16
            machine = describe_machine(gpus, nodes, dtype := "fp16")
    tokens, longest = index["splits"]["train"]["tokens"], template["longest"]
    vocabulary = index["vocab_size"]
    if template["architecture"]:
        template["architecture"]["vocab_size"] = -(-vocabulary // PADDED) * PADDED
    seq_len = _power_of_two(tokens // SEQUENCES, SHORTEST, min(LONGEST, longest))
    ranks = machine.world_size if machine else 1
    sequences = max(1, tokens // seq_len)
    least = max(SMALLEST_BATCH, 1 << (ranks - 1).bit_length())  # so that each rank has a sequence
    global_batch = _power_of_two(sequences // STEPS, least, max(least, LARGEST_BATCH))
    steps = -(-sequences // global_batch)
    values: dict[str, Any] = {
        **template,
        "file": file,
        "run_dir": f"runs/{Path(file).stem}",
        "cpu": cpu,
        "data": data,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "steps": f"{steps:,}",
        "evaluate_every": max(1, steps // 10) if index["splits"]["validation"]["tokens"] else 0,
        "checkpoint_every": max(1, min(500, steps // 5)),
        "snapshot_every": max(1, min(10, steps // 20)),
        "dtype": dtype,
        "micro_batch": "auto",
        "strategy": {"name": "fsdp"},
        "plan": ["On CPU cores, with float32: every CPU has it."],
    }
    if machine:
        # The draft itself is planned, so that the plan applies to the recipe as written.
        values |= _plan_values(make_plan(_read(_render(values)), machine, "cuda"))
    text = _render(values)
    _read(text)
    return text


def this_machine() -> str:
    """GPUs of this machine, in the notation of `draft`."""
    import torch

    if not torch.cuda.is_available():
        return CPU
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory
    return f"{count}x{listed_name(name) or f'{memory / 1e9:.0f}GB'}"


def with_architecture() -> dict[str, dict[str, Any]]:
    """Name of a shipped recipe → its architecture."""
    trees = {
        name: yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        for name, path in shipped_recipes().items()
    }
    return {name: tree["architecture"] for name, tree in trees.items() if "architecture" in tree}


def _index(data: str) -> dict[str, Any]:
    try:
        index = read_index(data)
    except DataError:
        if (Path(data) / "index.json").exists() or not Path(data).exists():
            raise
        raise RecipeError(
            f"--data: {data} is not prepared yet; perdure data prepare {data} --out "
            f"data/{Path(data).stem} --tokenizer MODEL/tokenizer.json, and use that directory"
        ) from None
    if index.get("kind") == "pairs":
        raise RecipeError(
            f"--data: {data} has pairs of answers, and training on preferences has its own "
            "recipe: perdure recipe copy dpo"
        )
    return index


def _model(model: str) -> dict[str, Any]:
    """Values of the template for a model: `directory`, or `shipped` and `architecture`."""
    if Path(model).is_dir():
        architecture = read_config(model)
        what = f"{architecture.model_type} of {model}, trained on."
        values = {"what": what, "longest": architecture.max_position_embeddings, "lr": "1.0e-5"}
        return {"directory": model, "shipped": "", "architecture": {}, **values}
    known = with_architecture()
    if model not in known:
        raise RecipeError(
            f"--model: {model} is no directory, and none of {', '.join(known)}; a model of the Hub "
            f"is downloaded by: hf download {model} --local-dir {Path(model).name}"
        )
    shipped = known[model]
    return {
        "directory": "",
        "shipped": model,
        "architecture": shipped,
        "what": f"{shipped['model_type']} as in {model}.yaml, from fresh weights.",
        "longest": shipped.get("max_position_embeddings", LONGEST),
        "lr": "1.0e-3" if shipped["hidden_size"] < 1024 else "3.0e-4",
    }


def _plan_values(plan: Plan) -> dict[str, Any]:
    """Values of the template for a plan. Raises RecipeError if no strategy fits into memory."""
    machine, best = plan.machine, plan.best
    where = f"{machine.nodes} node(s) of {machine.gpus_per_node} GPU(s)"
    if best is None:
        more = f"; {plan.enough_nodes} such nodes are enough" if plan.enough_nodes else ""
        least = min(candidate.prediction.peak for candidate in plan.candidates) / 1e9
        raise RecipeError(
            f"--gpus: no strategy fits {where}: {least:.3g} GB of "
            f"{machine.gpu.memory / 1e9:.3g} are needed at least{more}; use more or larger GPUs, "
            "or a smaller model"
        )
    prediction, settings = best.prediction, recommended(best)
    return {
        "micro_batch": settings["batch"]["micro_batch"],
        "strategy": settings["strategy"],
        "plan": [
            f"Planned for {where} with {machine.gpu.memory / 1e9:.0f} GB: {best.label}, recompute",
            f"{best.recipe.strategy.activation_checkpointing}. Predicted, not measured: "
            f"{prediction.peak / 1e9:.2g} GB a GPU, {prediction.seconds_per_step:.3g} s a step, "
            f"{prediction.mfu:.0%} MFU.",
        ],
    }


def _power_of_two(wanted: int, least: int, most: int) -> int:
    """Clamp `wanted` to `least` and `most` (`most` wins), and round it down to a power of two."""
    return 1 << (max(min(wanted, most), min(least, most), 1).bit_length() - 1)


def _render(values: dict[str, Any]) -> str:
    """Fill in the template, and align its comments: " ## " in the template, " # " in the result."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["yaml"] = yaml_scalar
    template = (Path(__file__).parent / "draft.yaml").read_text(encoding="utf-8")
    text = environment.from_string(template).render(values)
    parts = (line.rpartition(" ## ") for line in text.splitlines())
    return "".join(f"{key:<31} # {why}\n" if mark else f"{why}\n" for key, mark, why in parts)


def _read(text: str) -> Recipe:
    return validate(yaml.safe_load(text), {}, "the draft")
