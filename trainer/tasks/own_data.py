"""`data.factory`: the user's own data, as streams."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.data import Samples, Stream
from trainer.data.sample_stream import SampleStream, fingerprint
from trainer.data.shards import DataError
from trainer.data.stream import COUNTED
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.factory import call_factory, refusing

TRIED = 8
"""Samples that are put into a batch at the start: one alone shows no misfit."""


def open_samples(recipe: Recipe) -> tuple[Samples, Stream, Stream | None]:
    """What `data.factory` returns, and its training and validation data.

    Raises:
        RecipeError: it cannot be found, or gives no data that can be trained on.
        DataError: the data is not what it should be.
    """
    data, name = recipe.data, recipe.data.factory or ""
    found = call_factory("data.factory", name, data.factory_options, recipe=recipe)
    if type(found) is tuple and all(map(_is_data_set, found)):
        raise RecipeError(
            f"data.factory: {name} returned {len(found)} data sets; return trainer.Samples("
            "train, validation=…)"
        )
    samples = found if isinstance(found, Samples) else Samples(found)

    def stream(dataset: Any, part: str, shuffle: bool) -> Stream:
        if isinstance(dataset, Stream):
            return dataset
        named, seed = f"the {part} set of {name}", recipe.run.seed
        return SampleStream(named, dataset, samples.collate, seed=seed, shuffle=shuffle)

    train = stream(samples.train, "training", True)
    if isinstance(train, SampleStream):
        said = samples.fingerprint or getattr(samples.train, "_fingerprint", None)
        train.fingerprint = fingerprint(name, data.factory_options, train.sequences, said)
    if train.sequences < recipe.batch.global_batch:
        raise RecipeError(
            f"data.factory: the training set of {name} holds {train.sequences} sample(s), fewer "
            f"than one global batch of {recipe.batch.global_batch}; lower batch.global_batch"
        )
    if not recipe.run.evaluate_every:
        return samples, train, None
    if samples.validation is None:
        raise RecipeError(
            f"run.evaluate_every: {name} gives no validation set; return trainer.Samples("
            "train, validation=…), or set run.evaluate_every=0"
        )
    return samples, train, stream(samples.validation, "validation", False)


def _is_data_set(value: Any) -> bool:
    """And no sample, which may be a mapping or a tuple."""
    both = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return both and not isinstance(value, Mapping | tuple | str | torch.Tensor | np.ndarray)


def first_batch(stream: Stream, name: str) -> dict[str, Any]:
    """The first samples of a stream, of the factory that `name` says.

    Raises:
        RecipeError: a stream of the user's fails.
        DataError: there is something that no model can be called with.
    """
    with refusing("data.factory", f"fetch of {name}"):
        return inputs_of(stream.fetch(range(min(stream.sequences, TRIED))))


def check_decoder_inputs(batch: dict[str, Any], vocab_size: int, multiple: int) -> None:
    """Refuse data that the bundled decoder cannot read.

    Args:
        batch: of the data set.
        vocab_size: of the decoder.
        multiple: what divides a sequence: the ranks that cut it.

    Raises:
        DataError: what is missing, out of its vocabulary, or of another length.
    """
    missing = {"input_ids", "labels"} - batch.keys()
    if missing:
        raise DataError(
            f"data.factory: samples have no {' and no '.join(sorted(missing))}; a language model "
            "is given input_ids and labels, the token after each (-100 where none counts)"
        )
    largest = int(batch["input_ids"].max())
    if largest >= vocab_size:
        raise DataError(
            f"data.factory: token {largest} is outside model.architecture.vocab_size={vocab_size}"
        )
    length = batch["input_ids"].shape[-1]
    if length % multiple:
        raise DataError(
            f"data.factory: a sequence of {length} tokens does not divide among "
            f"strategy.tp={multiple}; pad it to a multiple, or set "
            "strategy.sequence_parallel=false"
        )


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """What of a batch goes to the model."""
    return {name: value for name, value in batch.items() if name != COUNTED}
