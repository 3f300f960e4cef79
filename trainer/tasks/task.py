"""What a recipe trains: model, data and the files that make its checkpoints complete."""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from trainer.data import Samples
from trainer.data.loader import TokenStream
from trainer.data.sample_stream import SampleStream, count_of
from trainer.data.shards import read_index
from trainer.data.stream import Stream
from trainer.models import Decoder, Family
from trainer.models.adapter import adapter_config
from trainer.models.model_files import CONFIG, files_beside, files_without_tokenizer, of_bf16
from trainer.models.nf4 import weights_in
from trainer.models.transformers_model import TextModel, TransformersModel
from trainer.recipe import Optimizer, ParameterGroup, Recipe, RecipeError
from trainer.recipe.architecture import Architecture
from trainer.recipe.factory import call_factory
from trainer.recipe.strategies import tp
from trainer.tasks.blocks import repeated_blocks
from trainer.tasks.own_data import check_decoder_inputs, first_batch, open_samples
from trainer.tasks.own_model import (
    arguments_of,
    attributes_of,
    check_signature,
    check_tensors,
    give_next_tokens,
    keep_in_float32,
    shifts_labels,
)
from trainer.tasks.text_model import AfterStep, after_step_of, build_text_model, documents_for

if TYPE_CHECKING:
    from trainer.parallel.parallelize import Fill

LARGEST_OWN_VOCABULARY = 65_536
"""Tokens that a tokenizer for a small model is trained to have; more have those of known models."""


@dataclass(frozen=True)
class Evaluation:
    """The validation set, and what is measured on it."""

    stream: Stream
    count: int
    """Samples that are looked at: the first ones."""
    values: Callable[[Mapping[str, float]], dict[str, float]]
    """Means over these samples of what the model returns, by name → what is recorded."""


@dataclass(frozen=True)
class Task:
    """A model on the meta device (or, from a factory, on the CPU), and its data."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """Repeated parts of the model: units of sharding, recomputation and compilation."""
    fill: "Fill | None"
    """Initial weights and persistent buffers by FQN and shape, see parallelize.Fill; None when the
    model came with its own."""
    stream: Stream
    validation: Evaluation | None
    flops_per_token: float
    """See `Family.flops_per_token`."""
    parameter_count: int
    trained_count: int
    """Parameters that the optimizer updates; the others are frozen."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """config.json, tokenizer.json and so on, for checkpoints."""
    pretrained: Collection[str] | None = None
    """What model.init_from gives, by FQN; the rest is drawn. None: all."""
    unit: str = "tokens"
    """What is counted in speeds."""
    usual_count: float = 1.0
    """Over how many things the mean loss of a sample is usually taken (see COUNTED): gradients are
    divided by so much at once, by what is left when the step has counted."""
    counts_labels: bool = False
    """Whether the tokens of a run are the labels that its steps count, as sequences differ in how
    many they have; else they are those of its sequences."""
    tried: Sequence[Mapping[str, torch.Tensor]] = ()
    """What the model can be called with, to try it: a batch of the training set, and of the
    validation set."""
    notes: Sequence[str] = ()
    """What a user should know before training."""
    groups: Sequence[ParameterGroup] = ()
    """What the model says of how parameters are trained; the recipe's come first."""
    after_step: AfterStep | None = None
    """Called on all ranks after each step, with the parallel model and the samples consumed so far:
    for what changes in the model besides by the optimizer."""
    tied_copies: Mapping[str, str] = field(default_factory=dict)
    """Second name of a tied weight in the files of `model.init_from` → its name in the model."""

    @property
    def sizes(self) -> str:
        """How many parameters there are, and how many of them are trained."""
        if self.trained_count == self.parameter_count:
            return f"{self.parameter_count / 1e6:,.1f} M parameters"
        frozen = self.parameter_count - self.trained_count
        return f"{self.trained_count:,} parameters trained, {frozen:,} frozen"


def optimizer_options(recipe: Recipe, task: Task) -> Optimizer:
    """Those of the recipe, with the rules that the model adds: the first that matches counts."""
    return replace(recipe.optimizer, groups=(*recipe.optimizer.groups, *task.groups))


def build_task(recipe: Recipe) -> Task:
    """Open the data and build the model. Needs no process group and no GPU.

    Raises:
        RecipeError: an input of the recipe is missing or does not fit the others.
        DataError: a prepared data set is damaged.
    """
    if recipe.data.factory:
        return _build_on_samples(recipe)
    stream, validation = open_streams(recipe)
    if recipe.model.factory:
        model, blocks, notes = _call_factory(recipe)
        notes += give_next_tokens(recipe, model)
        documents = ["document_ids"] if recipe.data.document_mask else []
        check_signature(recipe, model, ["input_ids", "labels", *documents])
        parameters, trained = _counts(model)
        return Task(
            type(model).__name__,
            model,
            blocks,
            None,
            stream,
            validation,
            6.0 * parameters,
            parameters,
            trained,
            notes=[*notes, *_of_chats(stream)],
            **attributes_of(model),
            **_counting(stream),
        )
    text_model, fill, of_model = build_text_model(recipe)
    _check_vocabulary(recipe, text_model)
    source = Path(recipe.data.sources[0].path)
    start, ours = recipe.model.init_from, _family_and_sizes(text_model)
    files, notes = files_beside(Path(start) if start else None, source, read_index(source), *ours)
    if recipe.precision.master == "bf16_stochastic":
        files = of_bf16(files)
    further = {**_of_model(recipe, text_model), **_counting(stream)}
    return Task(
        _name(recipe, text_model),
        text_model,
        list(text_model.blocks),
        fill,
        stream,
        validation,
        text_model.flops_per_token(recipe.data.seq_len),
        *_counts(text_model),
        _with_adapter(recipe, text_model, files),
        notes=[*of_model, *notes, *_of_chats(stream)],
        **further,
    )


def _of_model(recipe: Recipe, model: TextModel) -> dict[str, Any]:
    """What a model, or its family, says of how it is trained."""
    tied = {"tied_copies": model.tied_copies}
    if isinstance(model, TransformersModel):
        return tied
    groups, after_step = model.family.groups, after_step_of(recipe, model.family)
    return {**tied, "groups": groups, "after_step": after_step}


def _family_and_sizes(model: TextModel) -> tuple[Architecture | None, Family | None]:
    """What the config.json of a model is made from where there is none yet."""
    if isinstance(model, TransformersModel):
        return None, None
    return model.model.architecture, model.family


def _counting(stream: TokenStream) -> dict[str, Any]:
    """How the steps of a task count what they are trained on."""
    if stream.paired:
        return {"usual_count": max(1.0, stream.pairs_per_sequence)}
    if not stream.counted:
        return {}
    return {"usual_count": max(1.0, stream.labels_per_sequence), "counts_labels": True}


def _of_chats(stream: TokenStream) -> list[str]:
    """What a user should know of the sequences that a stream makes."""
    if not stream.counted:
        return []
    what = (
        f"{stream.pairs_per_sequence:,.1f} pairs each"
        if stream.paired
        else f"{stream.labels_per_sequence:,.0f} trained tokens each; `tokens` counts these"
    )
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
    """(parameters, those that are trained)."""
    parameters = [*model.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    every = weights_in if isinstance(model, Decoder | TransformersModel) else nn.Parameter.numel
    return sum(map(every, parameters)), trained


def _with_adapter(recipe: Recipe, model: TextModel, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a checkpoint, where it holds an adapter. Without config.json, or transformers
    would take it for a whole model, with random weights."""
    adapter, base = recipe.model.adapter, recipe.model.init_from
    if adapter is None or base is None:
        return files
    rest = {name: data for name, data in files.items() if name != CONFIG}
    return {**rest, ADAPTER_CONFIG: adapter_config(model, adapter, base)}


def _build_on_samples(recipe: Recipe) -> Task:
    """A model on the user's own data. No speed in FLOPs: what a sample costs is not known."""
    samples, stream, held_out = open_samples(recipe)
    streams = [one for one in (stream, held_out) if one]
    notes: list[str] = []
    blocks: Sequence[nn.Module]
    further: dict[str, Any] = {}
    values, fill = _named_values, None
    if recipe.model.factory:
        model, blocks, notes = _call_factory(recipe, samples)
        name, further = type(model).__name__, attributes_of(model)
    else:
        model, fill, of_model = build_text_model(recipe)
    for one in streams:
        if isinstance(one, SampleStream):
            one.arguments, one.shifted = arguments_of(model), shifts_labels(model)
    tried = [first_batch(one, recipe.data.factory or "") for one in streams]
    if isinstance(model, Decoder | TransformersModel) and not recipe.model.factory:
        multiple = tp.stream_parts(recipe.strategy)
        for batch in tried:
            check_decoder_inputs(batch, model.vocab_size, multiple)
        blocks, values = list(model.blocks), _loss_values
        start = Path(recipe.model.init_from) if recipe.model.init_from else None
        files, notes = files_without_tokenizer(start, *_family_and_sizes(model))
        if recipe.precision.master == "bf16_stochastic":
            files = of_bf16(files)
        further = {"files": _with_adapter(recipe, model, files), **_of_model(recipe, model)}
        name, notes = _name(recipe, model), [*of_model, *notes]
    for batch in tried:
        check_signature(recipe, model, batch)
    validation = Evaluation(held_out, held_out.sequences, values) if held_out else None
    if isinstance(stream, SampleStream):
        rows = max(1, len(next(iter(tried[0].values()), ())))
        count = count_of(tried[0], rows, shifted=stream.shifted)
        further["usual_count"] = max(1.0, count / rows)
    return Task(
        name, model, blocks, fill, stream, validation, 0.0, *_counts(model),
        unit="samples", notes=notes, tried=tried, **further,
    )  # fmt: skip


def check_plannable(recipe: Recipe) -> None:
    """Raises RecipeError for a model whose memory and time cannot be predicted."""
    if recipe.data.factory:
        raise RecipeError(
            "data.factory: only prepared tokens can be planned; `perdure compare` measures what "
            "training on other data takes"
        )


def bare_model(recipe: Recipe) -> tuple[nn.Module, list[nn.Module], float]:
    """(model, its repeated parts, `Task.flops_per_token`), without any data.

    Raises:
        RecipeError: the model cannot be built, or not planned.
    """
    check_plannable(recipe)
    if recipe.model.factory:
        model, blocks, _ = _call_factory(recipe)
        return model, blocks, 6.0 * sum(p.numel() for p in model.parameters())
    model, *_ = build_text_model(recipe)
    return model, list(model.blocks), model.flops_per_token(recipe.data.seq_len)


def _named_values(means: Mapping[str, float]) -> dict[str, float]:
    """Figures that stand in place of a loss, such as recall, keep their names."""
    prefix = "validation_" if "loss" in means else ""
    return {f"{prefix}{name}": mean for name, mean in means.items()}


def _loss_values(means: Mapping[str, float]) -> dict[str, float]:
    loss = means["loss"]
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"validation_loss": loss, "validation_perplexity": perplexity, **_named_values(means)}


def _how_to_prepare(recipe: Recipe, directory: str) -> str:
    """The command that makes a data set for a recipe: of a corpus that Perdure knows by name, if
    the directory is called so, with the model's tokenizer or one of the model's size."""
    from trainer.data.prepare.corpora import CORPORA  # no run needs it

    name, architecture = Path(directory).name, recipe.model.architecture
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


def open_streams(recipe: Recipe) -> tuple[TokenStream, Evaluation | None]:
    """Training and validation data.

    Raises:
        RecipeError: it is missing, or too small.
        DataError: it is damaged.
    """
    data = recipe.data
    for number, source in enumerate(data.sources):
        if not (Path(source.path) / "index.json").is_file():
            raise RecipeError(
                f"data.sources.{number}.path: no prepared data set at {source.path} (it has no "
                f"index.json); make one with `{_how_to_prepare(recipe, source.path)}`"
            )
    _check_kinds(recipe)
    if data.pack != "stream" and not data.document_mask:
        whole = [one.path for one in data.sources if read_index(one.path).get("kind") == "chats"]
        if whole:
            raise RecipeError(
                f"data.document_mask: false lets the chats of {whole[0]} see those before them in "
                "a sequence, which no model is served; set true, or data.pack=stream"
            )

    def open_split(split: str, shuffle: bool) -> TokenStream:
        return TokenStream.open(
            [(source.path, source.weight) for source in data.sources],
            split=split,
            seq_len=data.seq_len,
            seed=recipe.run.seed,
            shuffle=shuffle,
            documents=documents_for(recipe),
            reader=data.reader,
            pack=data.pack,
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
    return stream, Evaluation(validation, count, values)


def _check_kinds(recipe: Recipe) -> None:
    """Raises RecipeError: data that the objective cannot be computed of."""
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
            f"max_position_embeddings={model.most_positions}"
        )


def _call_factory(
    recipe: Recipe, data: Samples | None = None
) -> tuple[nn.Module, list[nn.Module], list[str]]:
    """The user's own module, its repeated parts, and what a user should know of its number formats.
    All ranks build it from the same seed, so weights agree. `data`: of `data.factory`, if any."""
    name, start = recipe.model.factory or "", recipe.model.init_from
    if start and not Path(start).is_dir():
        raise RecipeError(f"model.init_from: no checkpoint at {start}; make one, or set null")
    torch.manual_seed(recipe.run.seed)
    options = recipe.model.factory_options
    model = call_factory("model.factory", name, options, recipe=recipe, data=data)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model.factory: {name} returned {type(model).__name__}, not nn.Module")
    check_tensors(model, name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"model.factory: {type(model).__name__}, which {name} returned, has no parameter that "
            "is trained: none, or all have requires_grad=False"
        )
    if not model.training:  # as from_pretrained returns it; parts alone are meant to be so
        model.train()
    return model, repeated_blocks(model), keep_in_float32(recipe, model, name)
