"""Fetches micro-batches of a user's own data set by their positions in the order of the data."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from trainer.data.order import ORDER_VERSION, Order, sample_digest
from trainer.data.shards import DataError
from trainer.data.stream import COUNTED, IGNORED_LABEL
from trainer.recipe.factory import failure
from trainer.recipe.seeds import stable_seed

Batch = dict[str, Any]
Collate = Callable[[Sequence[Any]], Mapping[str, Any] | Sequence[Any]]


class SampleStream:
    """Micro-batches of a data set with `__len__` and `__getitem__`; see `trainer.Samples`. Random
    numbers that an item draws from torch, numpy.random or random are a function of its position,
    independent of ranks and restarts."""

    def __init__(
        self, name: str, dataset: Any, collate: Collate | None, *, seed: int, shuffle: bool
    ) -> None:
        """Raises DataError if `dataset` or `collate` cannot be used.

        Args:
            name: name of the data set in messages, after "data.factory: ".
            collate: items → batch; None: `stack`.
            shuffle: True: endless random order by seed; False: the data set's order, once.
        """
        self._name, name = name, f"data.factory: {name}"
        if collate is not None and not callable(collate):
            raise DataError(
                f"{name}: collate is of type {type(collate).__name__}, not a function; give a "
                "function from a list of items to a batch, or None"
            )
        if problem := _unlike_a_data_set(dataset):
            raise DataError(f"{name} is a {type(dataset).__name__} {problem}")
        self._dataset, self._collate = dataset, collate or stack
        self._seed, self._shuffle = seed, shuffle
        try:
            self.sequences = len(dataset)
        except _TRANSIENT:
            raise
        except Exception as error:
            raise DataError(f"{name}: its length {failure(error)}") from error
        if not self.sequences:
            raise DataError(f"{name} holds no sample")
        self._order = Order([self.sequences], [1.0], seed)
        self.fingerprint = ""
        """Identity of the data set; set by the caller, which knows the data's origin."""
        self.shifted = False
        """Whether the model shifts labels by one; set by the caller, which knows the model."""
        self.arguments: Sequence[str] = ()
        """Names of `forward`'s arguments, in order, for items that are tuples; set by the
        caller."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, sample) of each position, (N,) int64 each; the only source is 0."""
        if not self._shuffle:
            return np.zeros_like(positions), positions
        sources, _, samples = self._order.locate(positions)
        return sources, samples

    def fetch(self, positions: Sequence[int]) -> Batch:
        """Return `collate` of the samples at positions: tensors by name, and COUNTED, see
        `count_of`. Raises DataError if a sample cannot be read, or cannot be batched with the other
        samples."""
        numbers = np.asarray(positions, dtype=np.int64)
        _, samples = self.locate(numbers)
        pairs = zip(numbers.tolist(), samples.tolist(), strict=True)
        items = [self._item(position, sample) for position, sample in pairs]
        try:
            batch = _checked(_by_name(self._collate(items), self.arguments))
        except _TRANSIENT:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"data.factory: {self._name}: "
                + (str(error) if isinstance(error, DataError) else f"collate {failure(error)}")
                + f" (samples {_some(samples)})"
            ) from error
        count = count_of(batch, len(items), shifted=self.shifted)
        # A model may give NaN for a mean over no labels, which multiplication by the batch's
        # weight 0 would not remove. So one label is set.
        if not count:
            batch["labels"] = batch["labels"].clone()
            batch["labels"].view(-1)[-1:] = 0
        batch[COUNTED] = count
        return batch

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[Batch, tuple[int, int]]:
        """Read a micro-batch and its digest; see `AccountedStream`. The digest of contents is 0,
        because items may be random."""
        numbers = np.asarray(positions, dtype=np.int64)
        return self.fetch(positions), (sample_digest(numbers, *self.locate(numbers)), 0)

    def describe(self, global_batch: int) -> str:
        return f"from {self._name}"

    def _item(self, position: int, sample: int) -> Any:
        purpose = "sample" if self._shuffle else "validation sample"
        seed = stable_seed(self._seed, purpose, position)
        # Not torch.manual_seed, which would also seed GPUs, on which a step may be running.
        torch.default_generator.manual_seed(seed)
        # numpy's seed has 32 bits.
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        try:
            return self._dataset[sample]
        except _TRANSIENT:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"data.factory: {self._name}: sample {sample} {failure(error)}"
            ) from error


_TRANSIENT = (OSError, MemoryError)
"""Errors that may not occur again after a restart, and are raised unchanged."""


def _unlike_a_data_set(dataset: Any) -> str | None:
    """Describe why a value is no map-style data set, for a message after its type; None if it is
    one."""
    if isinstance(dataset, Mapping):
        parts = ", ".join(map(str, dataset))
        return f"of {parts}; choose, as in trainer.Samples(train=…, validation=…)"
    # Tables of pandas, polars and pyarrow; series of pandas.
    if hasattr(dataset, "__dataframe__") or hasattr(dataset, "iloc"):
        return (
            "of columns, where [0] is no row; give its rows, as pandas' frame.to_dict('records') "
            "and polars' frame.to_dicts() do, or datasets.Dataset.from_pandas(frame)"
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        return "that has its own order and batches; give its data set"
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, torch.utils.data.IterableDataset):
        missing = ["samples by number"]
    if missing:
        return (
            f"without {missing[0]}; it should be a map-style data set, as "
            "torch.utils.data.Dataset is, a list, or a trainer.Stream"
        )
    return None


def _by_name(batch: Any, arguments: Sequence[str]) -> Any:
    """Convert a tuple or list to a mapping by the names of `forward`'s arguments; return other
    batches unchanged. Raises DataError if it has more parts than there are names."""
    if not isinstance(batch, tuple | list):
        return batch
    # A named tuple has its own names.
    if hasattr(batch, "_asdict"):
        return batch._asdict()
    if len(batch) > len(arguments):
        taken = ", ".join(arguments) or "no arguments that have names"
        raise DataError(
            f"an item has {len(batch)} parts, which go to forward in this order, but forward takes "
            f"{taken}; give mappings of names to parts"
        )
    return dict(zip(arguments, batch, strict=False))


def stack(items: Sequence[Any]) -> Batch | tuple[torch.Tensor, ...]:
    """Stack mappings or tuples of arrays, tensors and numbers into tensors with a new first
    dimension. Items are matched by name or by place. float64, including Python's floats, becomes
    float32. Raises DataError if the items cannot be stacked."""
    items = [item._asdict() if hasattr(item, "_asdict") else item for item in items]
    for item in items:
        if type(item) is not type(items[0]) or not isinstance(item, Mapping | tuple):
            first_kind = type(items[0])
            others = "" if type(item) is first_kind else f", another a {first_kind.__name__}"
            raise DataError(
                f"an item is a {type(item).__name__}{others}; all items must be mappings of the "
                "names of forward's arguments to arrays, tensors or numbers, or tuples of these in "
                "the order of its arguments; change the items, or give a collate function"
            )
    first = items[0]
    if isinstance(first, tuple):
        if len({len(item) for item in items}) > 1:
            raise DataError(
                f"items are tuples of {_some({len(item): 0 for item in items})} parts; give all "
                "the same number of parts, or a collate function"
            )
        columns = enumerate(zip(*items, strict=True))
        return tuple(_stacked(f"part {place}", column) for place, column in columns)
    for item in items:
        if item.keys() != first.keys():
            raise DataError(
                f"items have {', '.join(first)}, and {', '.join(item)}; give all the same names, "
                "or a collate function"
            )
    return {name: _stacked(name, [item[name] for item in items]) for name in first}


def _stacked(name: str, values: Sequence[Any]) -> torch.Tensor:
    stacked: torch.Tensor | None = None
    try:
        if isinstance(values[0], torch.Tensor):
            stacked = torch.stack(list(values))
        else:
            array = np.stack([np.asarray(value) for value in values])
            if array.dtype.kind in "biuf":
                stacked = torch.from_numpy(array)
    except (ValueError, RuntimeError, TypeError) as error:
        shapes = [tuple(np.shape(value)) for value in values if hasattr(value, "shape")]
        shapes = shapes or [(len(value),) for value in values if hasattr(value, "__len__")]
        if len(set(shapes)) > 1:
            raise DataError(
                f"{name!r} has several shapes ({_some(dict.fromkeys(shapes))}), so items cannot be "
                "stacked; give a collate function that pads them"
            ) from error
        cause = str(error).partition("\n")[0]
        raise DataError(
            f"{name!r} cannot be stacked ({cause}); give it one shape and one dtype that torch "
            "has, or give a collate function"
        ) from error
    if stacked is None:
        raise DataError(
            f"{name!r} is a {type(values[0]).__name__}, not an array, tensor or number; leave it "
            "out of the items, or give a collate function"
        )
    return stacked.float() if stacked.dtype == torch.float64 else stacked


def _some(values: Iterable[Any]) -> str:
    first = list(map(str, islice(values, 5)))
    return ", ".join([*first[:4], *(["…"] if len(first) > 4 else [])])


def _checked(batch: Any) -> Batch:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"collate gives a {type(batch).__name__}; it must give a mapping of names to tensors, "
            "or a tuple of tensors"
        )
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise DataError(
                f"collate gives {name!r} as a {type(value).__name__}; it must give a tensor"
            )
    return dict(batch)


def count_of(batch: Mapping[str, torch.Tensor], samples: int, *, shifted: bool = False) -> int:
    """Number over which a batch's mean loss is taken: labels, or `samples` if there are no integer
    labels. Labels of value IGNORED_LABEL are not counted, nor, if `shifted`, the first label of
    each sample."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return samples
    return int((labels[..., 1 if shifted else 0 :] != IGNORED_LABEL).sum())


def fingerprint(name: str, options: Mapping[str, Any], size: int, of_data: str | None) -> str:
    """Identity of a data set: name and options of its factory, its size, and its own fingerprint if
    it has one."""
    parts = [ORDER_VERSION, name, dict(options), size, of_data]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return f"samples:{size}:{digest}"


def size_in(found: str) -> int:
    """Number of samples of the data set with this fingerprint; 0 for fingerprints of other
    streams."""
    kind, _, rest = found.partition(":")
    return int(rest.partition(":")[0]) if kind == "samples" else 0
