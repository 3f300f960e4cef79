"""Opens the data of `data.factory` as streams."""

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
"""Number of samples that are batched at the start: several, to find shapes that do not match."""


def open_samples(recipe: Recipe) -> tuple[Samples, Stream, Stream | None]:
    """Call `data.factory`. Returns its result, the training stream, and the validation stream or
    None. Raises RecipeError or DataError if the factory or its data is unusable."""
    data, name = recipe.data, recipe.data.factory or ""
    returned = call_factory("data.factory", name, data.factory_options, recipe=recipe)
    if type(returned) is tuple and all(map(_is_data_set, returned)):
        raise RecipeError(
            f"data.factory: {name} returned {len(returned)} data sets; return trainer.Samples("
            "train, validation=…)"
        )
    samples = returned if isinstance(returned, Samples) else Samples(returned)

    def stream(dataset: Any, part: str, shuffle: bool) -> Stream:
        if isinstance(dataset, Stream):
            return dataset
        named, seed = f"the {part} set of {name}", recipe.run.seed
        return SampleStream(named, dataset, samples.collate, seed=seed, shuffle=shuffle)

    train = stream(samples.train, "training", True)
    if isinstance(train, SampleStream):
        # Data sets of Hugging Face carry a `_fingerprint`.
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
    """Return whether a value is a data set, not a sample, which may be a mapping or a tuple."""
    both = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return both and not isinstance(value, Mapping | tuple | str | torch.Tensor | np.ndarray)


def first_batch(stream: Stream, name: str) -> dict[str, Any]:
    """Fetch the first TRIED samples of a stream, as a batch. Raises RecipeError if the user's
    stream fails. `name`: the factory, for that message."""
    with refusing("data.factory", f"fetch of {name}"):
        return inputs_of(stream.fetch(range(min(stream.sequences, TRIED))))


def check_decoder_inputs(batch: dict[str, Any], vocab_size: int, multiple: int) -> None:
    """Raise DataError for samples that a bundled decoder cannot read: inputs are missing, out of
    vocabulary, or of a length that `multiple` (for sequence parallelism) does not divide."""
    missing = {"input_ids", "labels"} - batch.keys()
    if missing:
        raise DataError(
            f"data.factory: samples have no {' and no '.join(sorted(missing))}; give a language "
            "model input_ids and labels: the token after each input, or -100 if it is not trained"
        )
    largest = int(batch["input_ids"].max())
    if largest >= vocab_size:
        raise DataError(
            f"data.factory: token {largest} is outside model.architecture.vocab_size={vocab_size}; "
            "raise vocab_size, or use the model's tokenizer"
        )
    length = batch["input_ids"].shape[-1]
    if length % multiple:
        raise DataError(
            f"data.factory: a sequence of {length} tokens does not divide among "
            f"strategy.tp={multiple}; pad it to a multiple, or set "
            "strategy.sequence_parallel=false"
        )


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a batch with which the model is called."""
    return {name: value for name, value in batch.items() if name != COUNTED}
