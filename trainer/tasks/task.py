"""Builds a `Task`, which is what a recipe trains: model, data, and further files of checkpoints."""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from checkpointing.format.nf4 import weights_in
from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from checkpointing.storage.place import location
from checkpointing.storage.steps import storage_of
from trainer.data import Samples
from trainer.data.loader import TokenStream
from trainer.data.sample_stream import SampleStream, count_of
from trainer.data.shards import is_prepared, read_index
from trainer.data.stream import Stream
from trainer.models import Decoder, Family, hf
from trainer.models.adapter import adapter_config
from trainer.models.transformers_model import TextModel, TransformersModel
from trainer.recipe import OptimizerSection, ParameterGroup, Recipe, RecipeError
from trainer.recipe.architecture import Architecture
from trainer.recipe.factory import call_factory
from trainer.recipe.stages import ordered, table
from trainer.recipe.strategies import tp
from trainer.tasks import own_model
from trainer.tasks.model_blocks import repeated_blocks
from trainer.tasks.own_data import check_decoder_inputs, first_batch, open_samples
from trainer.tasks.text_model import AfterStep, after_step_of, build_text_model, documents_for

if TYPE_CHECKING:
    from trainer.parallel.parallelize import Fill

LARGEST_OWN_VOCABULARY = 65_536
"""Largest vocabulary for which the command in an error message trains a new tokenizer."""


@dataclass(frozen=True)
class TaskValidation:
    """The validation data, and how results are computed from the model's scalars."""

    stream: Stream
    count: int
    """Number of samples in a validation pass: the first of the stream."""
    values: Callable[[Mapping[str, float]], dict[str, float]]
    """Means of the model's scalars over the samples → values to record."""


@dataclass(frozen=True)
class Task:
    """Model and data of a recipe. The model is on the meta device; from a factory, on the CPU."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """Blocks of the model: units of sharding, recomputation and compilation."""
    fill: "Fill | None"
    """Returns initial weights and persistent buffers, see parallelize.Fill; None for a factory's
    model, which has values already."""
    stream: Stream
    validation: TaskValidation | None
    flops_per_token: float
    """See `Family.flops_per_token`."""
    parameter_count: int
    trained_count: int
    """Number of weights that the optimizer updates; all other weights are frozen."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files of checkpoints, such as config.json: name → contents."""
    pretrained: Collection[str] | None = None
    """FQNs that `model.init_from` contains; other weights are random. None: all."""
    unit: str = "tokens"
    """Unit of speeds."""
    usual_count: float = 1.0
    """Expected number of labels of a sample (see COUNTED). Losses are divided by it in each pass;
    the step corrects gradients once the real number is known."""
    counts_labels: bool = False
    """Whether `tokens` of the run are labels, whose number varies by sequence, not all tokens."""
    tried: Sequence[Mapping[str, torch.Tensor]] = ()
    """Batches for a trial pass: of training data and, if there is any, of validation data. Empty
    for prepared data."""
    notes: Sequence[str] = ()
    groups: Sequence[ParameterGroup] = ()
    """Parameter groups of the model, which apply after the groups of the recipe."""
    after_step: AfterStep | None = None
    """Called on all ranks after each step, to change the model in addition to the optimizer."""
    tied_copies: Mapping[str, str] = field(default_factory=dict)
    """Second name of a tied weight in the files of `model.init_from` → its name in the model."""

    @property
    def sizes(self) -> str:
        """Numbers of all and of trained parameters, in words."""
        if self.trained_count == self.parameter_count:
            return f"{self.parameter_count / 1e6:,.1f} M parameters"
        frozen = self.parameter_count - self.trained_count
        return f"{self.trained_count:,} parameters trained, {frozen:,} frozen"


def optimizer_options(recipe: Recipe, task: Task) -> OptimizerSection:
    """Return the recipe's optimizer options, with parameter groups of the model added."""
    return replace(recipe.optimizer, groups=(*recipe.optimizer.groups, *task.groups))


def build_task(recipe: Recipe) -> Task:
    """Open the data and build the model. Needs neither a process group nor a GPU. Raises
    RecipeError if inputs of the recipe are missing or do not fit each other, DataError if a
    prepared data set is damaged."""
    if recipe.data.factory:
        return _build_on_samples(recipe)
    stream, validation = open_streams(recipe)
    if recipe.model.factory:
        model, blocks, notes = _call_factory(recipe)
        notes += own_model.give_next_tokens(recipe, model)
        documents = ["document_ids"] if recipe.data.document_mask else []
        own_model.check_signature(recipe, model, ["input_ids", "labels", *documents])
        parameters, trained = _counts(model)
        return Task(
            type(model).__name__, model, blocks, None, stream, validation,
            6.0 * parameters,  # per parameter and token: 2 FLOPs forward, 4 backward
            parameters, trained, notes=[*notes, *_of_chats(stream)],
            **own_model.attributes_of(model), **_counting(stream),
        )  # fmt: skip
    text_model, fill, of_model = build_text_model(recipe)
    _check_vocabulary(recipe, text_model)
    source = location(recipe.data.sources[0].path)
    start, ours = recipe.model.init_from, _family_and_sizes(text_model)
    begin = location(start) if start else None
    files, notes = hf.files_beside(begin, source, read_index(source), *ours)
    further = {**_of_model(recipe, text_model), **_counting(stream)}
    flops = text_model.flops_per_token(recipe.data.seq_len)
    return Task(
        _name(recipe, text_model), text_model, list(text_model.blocks), fill, stream, validation,
        flops, *_counts(text_model), _completed(recipe, text_model, files),
        notes=[*of_model, *notes, *_of_chats(stream)], **further,
    )  # fmt: skip


def _of_model(recipe: Recipe, model: TextModel) -> dict[str, Any]:
    """Return the fields of a `Task` that the model or its family determines."""
    fields: dict[str, Any] = {"tied_copies": model.tied_copies}
    if not isinstance(model, TransformersModel):
        fields["groups"] = model.family.groups
        fields["after_step"] = after_step_of(recipe, model.family)
    return fields


def _family_and_sizes(model: TextModel) -> tuple[Architecture | None, Family | None]:
    """Return architecture and family for a new config.json; None for a model of transformers."""
    if isinstance(model, TransformersModel):
        return None, None
    return model.model.architecture, model.family


def _counting(stream: TokenStream) -> dict[str, Any]:
    """Return the fields of a `Task` about numbers of labels or pairs."""
    if stream.paired:
        return {"usual_count": max(1.0, stream.pairs_per_sequence)}
    if not stream.counted:
        return {}
    return {"usual_count": max(1.0, stream.labels_per_sequence), "counts_labels": True}


def _of_chats(stream: TokenStream) -> list[str]:
    """Return notes for the user about sequences of chats or pairs; [] for other data."""
    if not stream.counted:
        return []
    if stream.paired:
        what = f"{stream.pairs_per_sequence:,.1f} pairs each"
    else:
        what = f"{stream.labels_per_sequence:,.0f} trained tokens each; `tokens` counts these"
    notes = [f"data: {stream.sequences:,} sequences, {stream.fullness:.1%} full, with about {what}"]
    if stream.left_out:
        items = "pairs" if stream.paired else "documents"
        notes.append(
            f"data: {stream.left_out:,} {items} are longer than data.seq_len={stream.seq_len} "
            "and left out; raise it, or prepare the data with --max-tokens and --too-long cut"
        )
    return notes


def _name(recipe: Recipe, model: TextModel) -> str:
    adapter, name = recipe.model.adapter, model.name
    if adapter is None:
        return name
    lora = f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}"
    return f"{name} with an adapter ({lora}, over {adapter.base})"


def _counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of all weights and of trained weights."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    # A packed nf4 parameter has fewer elements than weights.
    every = weights_in if isinstance(model, Decoder | TransformersModel) else nn.Parameter.numel
    return sum(map(every, parameters)), trained


def _completed(recipe: Recipe, model: TextModel, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the model's files as checkpoints of this recipe have them: for weights in bf16, and
    with an adapter adapter_config.json in place of config.json."""
    adapter, base = recipe.model.adapter, recipe.model.init_from
    if recipe.precision.master == "bf16_stochastic":
        files = hf.of_bf16(files)
    if adapter is None or base is None:
        return files
    # With config.json transformers would open an adapter as a whole model with random weights.
    rest = {name: data for name, data in files.items() if name != hf.CONFIG}
    return {**rest, ADAPTER_CONFIG: adapter_config(model, adapter, base)}


def _build_on_samples(recipe: Recipe) -> Task:
    """Build a task on the data of `data.factory`. FLOPs are 0: the cost of a sample is unknown."""
    samples, stream, held_out = open_samples(recipe)
    streams = [one for one in (stream, held_out) if one]
    notes: list[str] = []
    blocks: Sequence[nn.Module]
    further: dict[str, Any] = {}
    values, fill = _named_values, None
    if recipe.model.factory:
        model, blocks, notes = _call_factory(recipe, samples)
        name, further = type(model).__name__, own_model.attributes_of(model)
    else:
        model, fill, of_model = build_text_model(recipe)
    for one in streams:
        # The model determines names for the items of a tuple, and whether labels are shifted.
        if isinstance(one, SampleStream):
            one.arguments = own_model.arguments_of(model)
            one.shifted = own_model.shifts_labels(model)
    tried = [first_batch(one, recipe.data.factory or "") for one in streams]
    if isinstance(model, Decoder | TransformersModel) and not recipe.model.factory:
        multiple = tp.stream_parts(recipe.strategy)
        for batch in tried:
            check_decoder_inputs(batch, model.vocab_size, multiple)
        blocks, values = list(model.blocks), _loss_values
        start = location(recipe.model.init_from) if recipe.model.init_from else None
        files, notes = hf.files_without_tokenizer(start, *_family_and_sizes(model))
        if recipe.run.samples and hf.TOKENIZER not in files:
            raise RecipeError(
                "run.samples: needs a tokenizer, and data.factory has none; remove it, or start "
                "from a model with a tokenizer.json (model.init_from)"
            )
        further = {"files": _completed(recipe, model, files), **_of_model(recipe, model)}
        name, notes = _name(recipe, model), [*of_model, *notes]
    for batch in tried:
        own_model.check_signature(recipe, model, batch)
    validation = TaskValidation(held_out, held_out.sequences, values) if held_out else None
    if isinstance(stream, SampleStream):
        rows = max(1, len(next(iter(tried[0].values()), ())))
        count = count_of(tried[0], rows, shifted=stream.shifted)
        further["usual_count"] = max(1.0, count / rows)
    return Task(
        name, model, blocks, fill, stream, validation, 0.0, *_counts(model),
        unit="samples", notes=notes, tried=tried, **further,
    )  # fmt: skip


def check_plannable(recipe: Recipe) -> None:
    """Raise RecipeError if a recipe takes its data from `data.factory`: memory and time are
    predicted only for prepared tokens."""
    if recipe.data.factory:
        raise RecipeError(
            "data.factory: only prepared tokens can be planned; `perdure compare` measures what "
            "training on other data takes"
        )


def bare_model(recipe: Recipe) -> tuple[nn.Module, list[nn.Module], float]:
    """Build the model of a recipe without its data; returns (model, its blocks,
    `Task.flops_per_token`). Raises RecipeError if the model cannot be built or planned."""
    check_plannable(recipe)
    if recipe.model.factory:
        model, blocks, _ = _call_factory(recipe)
        return model, blocks, 6.0 * sum(p.numel() for p in model.parameters())
    model, *_ = build_text_model(recipe)
    return model, list(model.blocks), model.flops_per_token(recipe.data.seq_len)


def _named_values(means: Mapping[str, float]) -> dict[str, float]:
    """Return the values to record: with `validation_` before the names if there is a loss."""
    prefix = "validation_" if "loss" in means else ""
    return {f"{prefix}{name}": mean for name, mean in means.items()}


def _loss_values(means: Mapping[str, float]) -> dict[str, float]:
    loss = means["loss"]
    # exp overflows a float64 above 709.
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"validation_loss": loss, "validation_perplexity": perplexity, **_named_values(means)}


def _how_to_prepare(recipe: Recipe, directory: str) -> str:
    """Return the command that prepares a data set for a recipe, or copies one to a bucket."""
    if "://" in directory:
        return shlex.join(["perdure", "data", "copy", "DIRECTORY", directory])
    from trainer.data.prepare.inputs import CORPORA  # imported only for this message

    name, architecture = location(directory).name, recipe.model.architecture
    words = ["perdure", "data", "prepare", name if name in CORPORA else "INPUT"]
    words += ["--pairs"] if recipe.objective.compares else []
    words += ["--out", directory]
    if recipe.model.init_from:
        words += ["--tokenizer", recipe.model.init_from]
    elif architecture and architecture.vocab_size <= LARGEST_OWN_VOCABULARY:
        words += ["--train-bpe", str(architecture.vocab_size)]
    else:
        words += ["--tokenizer", "tokenizer.json"]
    return shlex.join(words)


def open_streams(recipe: Recipe) -> tuple[TokenStream, TaskValidation | None]:
    """Open the training and validation data; without `run.evaluate_every`, the validation set is
    None. Raises RecipeError if data is missing or too small, DataError if it is damaged, and
    StorageError if a store does not answer or gives no access."""
    data = recipe.data
    for number, source in enumerate(data.sources):
        if not is_prepared(source.path):
            raise RecipeError(
                f"data.sources.{number}.path: no prepared data set at {source.path} (it has no "
                f"index.json); make one with `{_how_to_prepare(recipe, source.path)}`"
            )
    _check_kinds(recipe)
    if data.pack != "stream" and not data.document_mask:
        whole = [one.path for one in data.sources if read_index(one.path).get("kind") == "chats"]
        if whole:
            raise RecipeError(
                f"data.document_mask: false lets each chat of {whole[0]} attend to earlier chats "
                "in its sequence, unlike when the model is served; set true, or data.pack=stream"
            )

    stages, sources = table(data), ordered(data)

    def open_split(split: str, shuffle: bool) -> TokenStream:
        # Validation uses the data sets of the first stage throughout the run.
        few = len(stages[0].joins) if stages and not shuffle else None
        return TokenStream.open(
            [(source.path, source.weight) for source in sources[:few]],
            split=split,
            seq_len=data.seq_len,
            seed=recipe.run.seed,
            shuffle=shuffle,
            documents=documents_for(recipe),
            reader=data.reader,
            pack=data.pack,
            ahead=data.ahead,
            cache=data.cache,
            stages=stages if shuffle else (),
        )

    stream = open_split("train", shuffle=True)
    if stream.sequences < recipe.batch.global_batch:
        raise RecipeError(
            f"data: the training split holds {stream.sequences} sequences of {data.seq_len} "
            f"tokens, fewer than one global batch of {recipe.batch.global_batch}; prepare more "
            "data, or lower batch.global_batch or data.seq_len"
        )
    if not recipe.run.evaluate_every:
        return stream, None
    validation = open_split("validation", shuffle=False)
    if not validation.sequences:
        raise RecipeError(
            f"run.evaluate_every: the validation split holds no whole sequence of {data.seq_len} "
            "tokens; prepare the data with a larger --validation-fraction, or set "
            "run.evaluate_every=0"
        )
    count = min(data.validation_sequences, validation.sequences)
    values = _named_values if recipe.objective.compares else _loss_values
    return stream, TaskValidation(validation, count, values)


def _check_kinds(recipe: Recipe) -> None:
    objective = recipe.objective
    for number, source in enumerate(recipe.data.sources):
        kind = read_index(source.path).get("kind", "documents")
        if (kind == "pairs") == objective.compares:
            continue
        if objective.compares:
            raise RecipeError(
                f"objective.name: {objective.name} compares pairs of answers, but "
                f"data.sources.{number} ({source.path}) holds {kind}; prepare pairs with "
                "`perdure data prepare FILE --pairs`, or set sft"
            )
        raise RecipeError(
            f"data.sources.{number}.path: {source.path} holds pairs of answers, which sft does not "
            "compare; set objective.name to dpo, ipo, simpo or orpo"
        )


def _check_vocabulary(recipe: Recipe, model: TextModel) -> None:
    for number, source in enumerate(recipe.data.sources):
        tokens = read_index(source.path)["vocab_size"]
        if tokens > model.vocab_size:
            raise RecipeError(
                f"model.architecture.vocab_size: {model.vocab_size} is smaller than the "
                f"{tokens} tokens of the tokenizer of data.sources.{number} ({source.path}); "
                f"raise it to at least {tokens}, or prepare the data with another tokenizer"
            )
    if model.most_positions and recipe.data.seq_len > model.most_positions:
        raise RecipeError(
            f"data.seq_len: {recipe.data.seq_len} is longer than the model's "
            f"max_position_embeddings={model.most_positions}; lower it"
        )


def _call_factory(
    recipe: Recipe, data: Samples | None = None
) -> tuple[nn.Module, list[nn.Module], list[str]]:
    """Call `model.factory`. Returns the model, its blocks, and notes about its dtypes. `data`: the
    result of `data.factory`, if the recipe has one."""
    name, start = recipe.model.factory or "", recipe.model.init_from
    if start and not storage_of(location(start)).is_directory(location(start)):
        raise RecipeError(
            f"model.init_from: no checkpoint at {start}; name one that exists, or set null"
        )
    # All ranks take the same seed, so that their random weights agree.
    torch.manual_seed(recipe.run.seed)
    options = recipe.model.factory_options
    model = call_factory("model.factory", name, options, recipe=recipe, data=data)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model.factory: {name} returned {type(model).__name__}, not nn.Module")
    own_model.check_tensors(model, name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"model.factory: {type(model).__name__}, which {name} returned, has no parameter with "
            "requires_grad=True, so there is nothing to train"
        )
    # transformers' from_pretrained returns a model in eval mode. A model in train mode stays as it
    # is, even if some of its modules are in eval mode.
    if not model.training:
        model.train()
    return model, repeated_blocks(model), own_model.keep_in_float32(recipe, model, name)
