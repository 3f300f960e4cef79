"""A recipe: one YAML file → one frozen, validated `Recipe`. Imports no torch.

The dataclasses below are the whole vocabulary; the docstring under a field is its documentation
(the reference page and the JSON Schema are made from them). `load_recipe` reads the YAML with line
numbers, expands `${NAME}` and `${NAME:-default}`, applies `key.sub=value` overrides, validates
types, then the combinations that cannot work. All that is wrong is told at once: a `RecipeError` of
a line each that names the file, the line, the key and what to do.
"""

import copy
import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from checkpointing.options import CheckpointOptions
from elastic.options import ElasticOptions
from trainer.architecture import Architecture
from trainer.kgat_options import GraphData, Kgat
from trainer.yaml_tree import (
    Key,
    Origins,
    Problem,
    RecipeError,
    listed,
    origin_of,
    read_tree,
)

Sharding = Literal["NO_SHARD", "OPTIMIZER_STATE", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
ZERO_STAGES: dict[int, Sharding] = {
    0: "NO_SHARD",
    1: "OPTIMIZER_STATE",
    2: "SHARD_GRAD_OP",
    3: "FULL_SHARD",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run, for how long, and where it leaves its files."""

    dir: str
    """Directory of this run: resolved recipe, metrics, checkpoints. Starting the same recipe again
    resumes from the newest checkpoint in it."""

    steps: int
    """Optimizer steps of the whole run, counted from its beginning."""

    seed: int = 0
    """Seed of the initial weights, the order of the data, and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, else the CPU."""

    determinism: Literal["fast", "exact"] = "fast"
    """exact: losses, weights and optimizer state are the same bit for bit at every world size and
    under every sharding, also when ranks come and go (on one kind of device, with the same
    batch.micro_batch). It costs time and memory: micro-batches never shrink to fit, gradients are
    kept and reduced in float64, kernels are deterministic and slower, and a CPU rank has one
    thread."""

    log_every: int = 10
    """Steps between console lines and between records in metrics.jsonl."""

    evaluate_every: int = 0
    """Steps between validation passes; also one after the last step. 0: no validation."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: exactly one of `architecture`, `init_from`, `factory` and `kgat`, which may come
    with `init_from`."""

    architecture: Architecture | None = None
    """A Llama 3 or Qwen3 decoder, in the words of a Hugging Face config.json, with fresh
    weights."""

    init_from: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors, sharded or not) whose
    architecture and weights the run starts from."""

    factory: str | None = None
    """`package.module:function` that returns any nn.Module. It is called with `factory_options`;
    the module is called with input_ids, labels (labels[t] is the token after input_ids[t]) and,
    with data.document_mask, document_ids, and returns the mean loss over the labels."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    kgat: Kgat | None = None
    """A recommender, from interactions and a knowledge graph; with data.graph. `kgat: {}` is the
    paper's model. With `init_from` it starts from the embeddings of that checkpoint, such as one of
    BPR-MF, as the paper's does."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One prepared data set of the mixture."""

    path: str
    """Directory written by `perdure data prepare`."""

    weight: float = 1.0
    """Share of the sequences taken from this source, relative to the other weights."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, and in which order: `sources` and `seq_len`, or `graph`."""

    sources: tuple[Source, ...] = ()
    """Prepared data sets; the order of the samples is a function of seed and position alone."""

    seq_len: int = 0
    """Tokens per sequence."""

    graph: GraphData | None = None
    """Interactions and a knowledge graph, for model.kgat."""

    document_mask: bool = True
    """Attention stays inside a document when several are packed into one sequence."""

    validation_sequences: int = 64
    """Sequences of the fixed validation set, the same ones at every evaluation and world size;
    fewer if the validation split is smaller."""

    reader: Literal["auto", "mmap", "pread", "ram"] = "auto"
    """How shards are read. auto: pread on network filesystems, mmap elsewhere."""

    workers: int = 0
    """Background loader processes per rank. 0 reads in the training process, which is fastest for
    prepared tokens on a local disk."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences per optimizer step; constant whatever the number of machines."""

    global_batch: int
    """Sequences per optimizer step over all ranks."""

    micro_batch: int = 1
    """Most sequences one rank holds in one forward pass; the rest is gradient accumulation."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused."""

    lr: float
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; norms, biases and other vectors have none."""

    clip_norm: float = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over the run: linear warm-up, then a shape."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """wsd: warm-up, stable, then linear decay over the last `decay_steps`."""

    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to optimizer.lr."""

    decay_steps: int = 0
    """Steps of the final decay, for wsd only."""

    min_lr_ratio: float = 0.1
    """Learning rate at the last step as a share of optimizer.lr (cosine, linear, wsd)."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the model is spread over ranks."""

    name: Literal["ddp", "fsdp"] = "fsdp"
    """ddp: every rank holds everything. fsdp: shards by `sharding` (FSDP2)."""

    sharding: Sharding | None = None
    """What is sharded (fsdp only; FULL_SHARD unless set): NO_SHARD nothing, OPTIMIZER_STATE the
    optimizer state (ZeRO-1), SHARD_GRAD_OP also gradients (ZeRO-2), FULL_SHARD also parameters
    (ZeRO-3), HYBRID_SHARD everything inside a group of `shard_size` ranks, replicated over the
    groups."""

    zero: Literal[0, 1, 2, 3] | None = None
    """The same as `sharding`, in DeepSpeed's numbers: give one of the two."""

    shard_size: int | None = None
    """Ranks per shard group for HYBRID_SHARD; the ranks of one node unless set."""

    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where sharded parameters, gradients and optimizer state live, and the optimizer runs. none:
    on the device. cpu: in host memory. nvme: in files on a local disk, of which host memory holds
    what is in use (see docs/offload.md)."""

    offload_directory: str | None = None
    """Directory on a local disk, for offload: nvme. Each rank takes 16 bytes there for each
    parameter of its shard, before training begins; the space is free again when the process ends,
    however it does."""

    reduce_every_pass: bool = False
    """Reduce-scatter gradients after every accumulation pass instead of once per step: more
    communication, but no rank ever holds unsharded gradients between passes."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: recompute each block in the backward pass. selective: keep the results of matrix
    products and attention, recompute the rest."""

    compile: bool = False
    """torch.compile each block. The first step then takes longer."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. Parameters and optimizer state stay in float32."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format of activations and matrix products (and of gathered parameters under fsdp).
    Gradients are reduced in float32. fp16 uses a dynamic loss scale."""

    loss_scale: float = 65536.0
    """First loss scale for fp16; halved on overflow, doubled after 2000 good steps."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where metrics go besides the console and metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to <run.dir>/tensorboard."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; a restarted run continues under the same run id."""

    project: str = "perdure"
    """Weights & Biases project."""

    name: str | None = None
    """Name of the run in trackers; the last part of run.dir unless set."""

    profile_steps: int = 0
    """Run so many steps under torch's profiler, which slows them; they count in no speed. Each rank
    leaves its trace, and a record of what it holds and how long it communicates, in
    <run.dir>/profile (see docs/profile.md). 0: none."""

    profile_after: int = 4
    """Steps after a start, or a restart, that come before the profiled ones."""

    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device at precision.dtype, for MFU. Known for common NVIDIA GPUs;
    elsewhere MFU is left out unless this is set."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run depends on."""

    run: Run
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    strategy: Strategy = Strategy()
    precision: Precision = Precision()
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    tracking: Tracking = Tracking()

    # Reaches the nested sections too: unknown keys are errors, docstrings become descriptions.
    __pydantic_config__: ClassVar[ConfigDict] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    @property
    def checkpoint_directory(self) -> str:
        """Where the checkpoints of the run lie: a path or a URL."""
        return self.checkpoint.directory or str(Path(self.run.dir) / "checkpoints")

    @property
    def exact(self) -> bool:
        """Whether results must not depend on the world size in any bit."""
        return self.run.determinism == "exact"

    @property
    def sharding(self) -> Sharding:
        """What FSDP shards; DDP counts as NO_SHARD."""
        if self.strategy.name == "ddp":
            return "NO_SHARD"
        return self.strategy.sharding or "FULL_SHARD"


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with this package, by name."""
    files = (Path(__file__).parent / "recipes").glob("*.yaml")
    return {file.stem: file for file in sorted(files)}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path: YAML file.
        overrides: `key.sub=value` strings, applied in order; list items by number
            (`data.sources.0.path=…`). Values are YAML.

    Raises:
        RecipeError: a line for each problem, with file, line, key and remedy.
    """
    name = Path(path).stem
    if not Path(path).exists() and name in shipped_recipes():
        raise RecipeError(
            f"{path}: there is no such file; Perdure comes with a recipe of this name: perdure "
            f"recipe copy {name} {Path(path).with_suffix('.yaml')}"
        )
    tree, origins, problems = read_tree(path, overrides)
    return validate(tree, origins, str(path), problems)


def validate(
    tree: dict[str, Any], origins: Origins, file: str, problems: Sequence[Problem] = ()
) -> Recipe:
    """Plain values → recipe.

    Args:
        tree: sections; one that is None is empty.
        origins: where each key was written.
        file: where the others were.
        problems: that are known already.

    Raises:
        RecipeError: a line for each problem, with file, line, key and remedy.
    """
    tree = {section: {} if keys is None else keys for section, keys in tree.items()}
    found = list(problems)
    wrong = {problem.key for problem in found}
    recipe = _typed(tree, origins, file, found, wrong)
    if recipe:
        recipe = _place_slots(_resolve_synonyms(recipe))
        # What follows only from a wrong value is not told: it may be right with the right one.
        names = {part for key in wrong for part in key[1:] or key if isinstance(part, str)}
        for key, what in _contradictions(recipe):
            if not names & set(re.findall(r"\w+", f"{key} {what}")):
                path = tuple(key.split("."))
                found.append(Problem(origin_of(path, origins, file), path, what))
    if found or not recipe:
        raise RecipeError(listed(found, origins))
    return recipe


def _typed(
    tree: dict[str, Any],
    origins: Origins,
    file: str,
    problems: list[Problem],
    wrong: set[Key],
) -> Recipe | None:
    """Check keys and types. What is wrong is added to `problems` and `wrong`, taken out, and, where
    it is required, filled in, so that the rest can be judged; None if even that cannot be."""
    tree = copy.deepcopy(tree)
    for attempt in range(4):
        try:
            return _adapter().validate_python(tree)
        except ValidationError as error:
            errors = [(_key_path(e["loc"], tree), e) for e in error.errors(include_url=False)]
            # A misspelt key is told; that it is missing under its right name is the same problem.
            known = wrong | {
                (*path[:-1], meant)
                for path, e in errors
                if e["type"] == _UNKNOWN and (meant := _meant(path))
            }
            for path, e in errors:
                if not attempt and path not in known:
                    known.add(path)
                    problems.append(
                        Problem(origin_of(path, origins, file), path, _explain(e, path))
                    )
                wrong.add(path)
                _mend(tree, path, e["type"] in _MISSING)
    return None


def _mend(tree: dict[str, Any], path: Key, missing: bool) -> None:
    """Take a key out of a tree; one that is missing is filled in with something of its type."""
    here: Any = tree
    for part in path[:-1]:
        inside = isinstance(here, list) and isinstance(part, int) and part < len(here)
        here = here[part] if inside else here.get(part) if isinstance(here, dict) else None
    if missing and isinstance(here, dict):
        kind = _schema_at(path)[1].get("type")
        here[path[-1]] = {"string": "x", "integer": 1, "number": 1.0}.get(str(kind), {})
    elif isinstance(here, dict):
        here.pop(path[-1], None)
    elif isinstance(here, list):
        here.clear()


@cache
def _adapter() -> TypeAdapter[Recipe]:
    """Takes 0.1 s to make, and every save needs it."""
    return TypeAdapter(Recipe)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, as JSON values."""
    values: dict[str, Any] = _adapter().dump_python(recipe, mode="json")
    return values


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every default filled in, as YAML that `load_recipe` reads back equal."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    schema = _adapter().json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


# --- errors ----------------------------------------------------------------------------------


_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNKNOWN = "unexpected_keyword_argument"


def _meant(path: Key) -> str | None:
    """The known key that an unknown one resembles."""
    close = difflib.get_close_matches(str(path[-1]), _keys_at(path[:-1]), n=1, cutoff=0.5)
    return close[0] if close else None


def _explain(problem: ErrorDetails, path: Key) -> str:
    """What is wrong with a key, and what to do."""
    if problem["type"] == _UNKNOWN:
        meant = _meant(path)
        hint = (
            f"did you mean '{meant}'?" if meant else f"known keys: {', '.join(_keys_at(path[:-1]))}"
        )
        return f"unknown key; {hint}"
    if problem["type"] in _MISSING and len(problem["loc"]) > len(path):
        return f"the list has too few items: {problem['input']}"
    if problem["type"] in _MISSING:
        meaning = _description_at(path)
        return "required, but not set" + (f" ({meaning})" if meaning else "")
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    shown = repr(problem.get("input"))
    return f"{message}, but it is {shown if len(shown) < 80 else shown[:77] + '...'}"


def _key_path(loc: Sequence[str | int], tree: Any) -> Key:
    """pydantic's location without the union branches that it appends below a scalar."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            break
        path.append(part)
    return tuple(path)


def definition_of(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow $ref, optional and list wrappers down to a definition."""
    if "$ref" in value:
        return schema["$defs"][value["$ref"].rsplit("/", 1)[1]]
    for option in value.get("anyOf", []):
        if "$ref" in option:
            return definition_of(option, schema)
    if isinstance(value.get("items"), dict):
        return definition_of(value["items"], schema)
    return value


def _schema_at(path: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a key (descriptions included), and the definition it leads to."""
    schema = recipe_schema()
    value: dict[str, Any] = schema
    for part in path:
        if isinstance(part, str):
            value = definition_of(value, schema).get("properties", {}).get(part, {})
    return value, definition_of(value, schema)


def _keys_at(path: Key) -> list[str]:
    return list(_schema_at(path)[1].get("properties", {}))


def _description_at(path: Key) -> str:
    value, definition = _schema_at(path)
    text = value.get("description") or definition.get("description", "")
    return " ".join(text.split()).split(". ")[0].rstrip(".")


# --- combinations ----------------------------------------------------------------------------


def _resolve_synonyms(recipe: Recipe) -> Recipe:
    """`strategy.zero` → `strategy.sharding`, unless the two contradict each other; a sample of a
    graph counts as one token."""
    if recipe.data.graph and not recipe.data.seq_len:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seq_len=1))
    strategy = recipe.strategy
    if strategy.zero is None or strategy.name == "ddp":
        return recipe
    sharding = ZERO_STAGES[strategy.zero]
    if strategy.sharding not in (None, sharding):
        return recipe
    strategy = dataclasses.replace(strategy, sharding=sharding, zero=None)
    return dataclasses.replace(recipe, strategy=strategy)


def _place_slots(recipe: Recipe) -> Recipe:
    """A model that memory does not hold is not copied to memory for checkpoints either."""
    directory, checkpoint = recipe.strategy.offload_directory, recipe.checkpoint
    if directory is None or checkpoint.slot_directory is not None:
        return recipe
    checkpoint = dataclasses.replace(checkpoint, slot_directory=directory)
    return dataclasses.replace(recipe, checkpoint=checkpoint)


def _contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Pairs of (key, what is wrong and what to do) for settings that cannot work together."""
    run, model, strategy, schedule = recipe.run, recipe.model, recipe.strategy, recipe.schedule
    for section, key, least in (
        ("run", "steps", 1),
        ("run", "log_every", 1),
        ("run", "evaluate_every", 0),
        ("run", "seed", 0),
        ("data", "seq_len", 1),
        ("data", "validation_sequences", 1),
        ("data", "workers", 0),
        ("batch", "global_batch", 1),
        ("batch", "micro_batch", 1),
        ("optimizer", "lr", 0),
        ("optimizer", "eps", 0),
        ("optimizer", "weight_decay", 0),
        ("optimizer", "clip_norm", 0),
        ("schedule", "warmup_steps", 0),
        ("schedule", "decay_steps", 0),
        ("schedule", "min_lr_ratio", 0),
        ("precision", "loss_scale", 1),
        ("checkpoint", "every", 0),
        ("checkpoint", "keep", 0),
        ("elastic", "max_skipped_steps", 0),
        ("elastic", "max_rollbacks", 0),
        ("elastic", "snapshot_every", 0),
        ("elastic", "check_replicas_every", 0),
        ("elastic", "timeout_seconds", 1),
        ("tracking", "profile_steps", 0),
        ("tracking", "profile_after", 1),
    ):
        value = getattr(getattr(recipe, section), key)
        if value != "auto" and not value >= least:  # also refuses NaN
            yield f"{section}.{key}", f"must be at least {least}, but it is {value}"
    for number, beta in enumerate(recipe.optimizer.betas):
        if not 0 <= beta < 1:
            yield "optimizer.betas", f"item {number} must be in [0, 1), but it is {beta}"
    if not recipe.data.sources and not recipe.data.graph:
        yield "data.sources", "the list is empty; name at least one prepared data set"
    for number, source in enumerate(recipe.data.sources):
        if not source.weight > 0:
            yield f"data.sources.{number}.weight", f"must be above 0, but it is {source.weight}"
    kinds = ("architecture", "init_from", "factory", "kgat")
    given = [key for key in kinds if getattr(model, key)]
    if len(given) != 1 and given != ["init_from", "kgat"]:
        found = " and ".join(given) or "none of them"
        yield "model", f"give exactly one of {', '.join(kinds)}; found {found}"
    yield from _graph_contradictions(recipe)
    if model.factory and not re.fullmatch(r"[\w.]+:[\w.]+", model.factory):
        yield "model.factory", f"write it as package.module:function, not {model.factory!r}"
    if model.factory_options and not model.factory:
        yield "model.factory_options", "only means something together with model.factory"
    if strategy.name == "ddp":
        for key in ("sharding", "zero", "shard_size"):
            if getattr(strategy, key) is not None:
                yield (
                    f"strategy.{key}",
                    "only with strategy.name: fsdp; set it to null, or set fsdp",
                )
        if strategy.offload != "none":
            yield "strategy.offload", "only with strategy.name: fsdp (DDP keeps all on the GPU)"
    if strategy.zero is not None and strategy.name == "fsdp":
        stage = ZERO_STAGES[strategy.zero]
        yield "strategy.zero", f"{strategy.zero} means {stage}, but sharding is {strategy.sharding}"
    if strategy.shard_size is not None and recipe.sharding != "HYBRID_SHARD":
        yield "strategy.shard_size", f"only with HYBRID_SHARD, but sharding is {recipe.sharding}"
    if strategy.offload != "none" and recipe.sharding in ("NO_SHARD", "OPTIMIZER_STATE"):
        yield (
            "strategy.offload",
            f"needs sharded parameters, but sharding is {recipe.sharding}; "
            "use SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD",
        )
    if (strategy.offload == "nvme") != (strategy.offload_directory is not None):
        yield (
            "strategy.offload_directory",
            "goes with strategy.offload: nvme; set both, or neither (a directory on a local disk)",
        )
    if recipe.exact:
        if recipe.sharding == "OPTIMIZER_STATE":
            yield (
                "strategy.sharding",
                "OPTIMIZER_STATE (ZeRO-1) has no exact mode; use SHARD_GRAD_OP, which shards the "
                "optimizer state too, or set run.determinism=fast",
            )
        if strategy.reduce_every_pass:
            yield (
                "strategy.reduce_every_pass",
                "adds up gradients in float32, in an order that depends on the world size; remove "
                "it, or set run.determinism=fast",
            )
        if recipe.precision.dtype == "fp16":
            yield (
                "precision.dtype",
                "fp16 has no exact mode (its range cannot hold the common grid of gradients); use "
                "bf16 or fp32, or set run.determinism=fast",
            )
    if recipe.tracking.profile_steps and recipe.tracking.profile_after >= run.steps:
        yield (
            "tracking.profile_after",
            f"{recipe.tracking.profile_after} leaves none of run.steps={run.steps} to profile; "
            "lower it",
        )
    if schedule.warmup_steps >= run.steps and schedule.warmup_steps > 0:
        yield "schedule.warmup_steps", f"{schedule.warmup_steps} is not below run.steps={run.steps}"
    if schedule.name == "wsd" and not 0 < schedule.decay_steps <= run.steps - schedule.warmup_steps:
        yield (
            "schedule.decay_steps",
            f"wsd needs 1 to {run.steps - schedule.warmup_steps} steps of decay "
            f"(run.steps - warmup_steps), but it is {schedule.decay_steps}",
        )
    if schedule.name != "wsd" and schedule.decay_steps:
        yield "schedule.decay_steps", f"only for schedule.name: wsd, but it is {schedule.name}"


def _graph_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    data, strategy = recipe.data, recipe.strategy
    if bool(recipe.model.kgat) != bool(data.graph):
        yield "data.graph", "goes with model.kgat: give both, or neither"
    if not data.graph:
        return
    if data.sources or data.seq_len != 1:
        yield "data.graph", "excludes data.sources and data.seq_len; remove them"
    if recipe.precision.dtype != "fp32":
        yield "precision.dtype", "model.kgat computes in fp32 only; set precision.dtype=fp32"
    if strategy.compile:
        yield "strategy.compile", "model.kgat has sparse products, which do not compile; remove it"
    if strategy.activation_checkpointing != "none":
        yield (
            "strategy.activation_checkpointing",
            "model.kgat has no blocks to recompute; remove it",
        )
