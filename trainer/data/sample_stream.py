"""The user's own data set, by position."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from trainer.data.order import ORDER_VERSION, Order, sample_digest
from trainer.data.samples import IGNORED_LABEL
from trainer.data.shards import DataError
from trainer.data.stream import COUNTED
from trainer.recipe.factory import failure
from trainer.recipe.seeds import stable_seed

Batch = dict[str, Any]
Collate = Callable[[Sequence[Any]], Mapping[str, Any] | Sequence[Any]]


class SampleStream:
    """Micro-batches of a data set with `__len__` and `__getitem__`. See `trainer.Samples`.

    Whatever an item draws from torch, numpy.random or random is a function of its position: it does
    not know the ranks, nor what was restarted.
    """

    def __init__(
        self, name: str, dataset: Any, collate: Collate | None, *, seed: int, shuffle: bool
    ) -> None:
        """
        Args:
            name: of the data set, as messages go on after "data.factory: ".
            dataset: with one sample at least.
            collate: items → batch; unless given, `stack`.
            seed: of the run.
            shuffle: in a keyed random order without end; else as it lies, once.

        Raises:
            DataError: it is no such data set.
        """
        self._name, name = name, f"data.factory: {name}"
        if collate is not None and not callable(collate):
            raise DataError(f"{name}: collate is of type {type(collate).__name__}, no function")
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
        """Set by whoever knows where it is from."""
        self.shifted = False
        """Whether the model predicts each label from what is before it; set by who knows that."""
        self.arguments: Sequence[str] = ()
        """Names of the arguments of `forward`, in order: what stands in tuples goes to them. Set by
        who knows the model."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample) of each position, (N,) int64 each; there is one source, 0."""
        if not self._shuffle:
            return np.zeros_like(positions), positions
        sources, _, samples = self._order.locate(positions)
        return sources, samples

    def fetch(self, positions: Sequence[int]) -> Batch:
        """What `collate` makes of the samples there: tensors, and COUNTED, `count_of` them.

        Raises:
            DataError: a sample cannot be had, or not be put beside the others.
        """
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
        if not count:  # the mean over nothing is NaN in most models, also times its weight, 0
            batch["labels"] = batch["labels"].clone()
            batch["labels"].view(-1)[-1:] = 0
        batch[COUNTED] = count
        return batch

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[Batch, tuple[int, int]]:
        """See `Accounted`. The second number is 0: an item need not be the same twice."""
        numbers = np.asarray(positions, dtype=np.int64)
        return self.fetch(positions), (sample_digest(numbers, *self.locate(numbers)), 0)

    def describe(self, global_batch: int) -> str:
        """See `Stream`."""
        return f"from {self._name}"

    def _item(self, position: int, sample: int) -> Any:
        purpose = "sample" if self._shuffle else "validation sample"
        seed = stable_seed(self._seed, purpose, position)
        torch.default_generator.manual_seed(seed)  # of the CPU: a GPU, if any, is busy
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
"""Errors that another start may not meet."""


def _unlike_a_data_set(dataset: Any) -> str | None:
    """What is wrong with something that should be a map-style data set, as messages go on after its
    type."""
    if isinstance(dataset, Mapping):
        parts = ", ".join(map(str, dataset))
        return f"of {parts}; choose, as in trainer.Samples(train=…, validation=…)"
    # What tables of pandas, polars and pyarrow have in common, and what series of pandas have.
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
    """A batch by the names of `forward`'s arguments, if it is a tuple or a list in their order."""
    if not isinstance(batch, tuple | list):
        return batch
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
    """Mappings, or tuples, of arrays, tensors and numbers → tensors of one more dim, by name, or in
    order. Numbers of double precision, Python's among them, become float32.

    Raises:
        DataError: what is in the way.
    """
    items = [item._asdict() if hasattr(item, "_asdict") else item for item in items]
    for item in items:
        if type(item) is not type(items[0]) or not isinstance(item, Mapping | tuple):
            others = "" if type(item) is type(items[0]) else f" and a {type(items[0]).__name__}"
            raise DataError(
                f"an item is a {type(item).__name__}{others}, no mapping of names to arrays, "
                "tensors or numbers, which go to forward by these names, and no tuple of such, "
                "which go to it in order; give a collate function, or wrap it"
            )
    first = items[0]
    if isinstance(first, tuple):
        if len({len(item) for item in items}) > 1:
            raise DataError(f"items are tuples of {_some({len(item): 0 for item in items})} parts")
        columns = enumerate(zip(*items, strict=True))
        return tuple(_stacked(f"part {place}", column) for place, column in columns)
    for item in items:
        if item.keys() != first.keys():
            raise DataError(f"items have {', '.join(first)}, and {', '.join(item)}")
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
                f"{name!r} has no one shape ({_some(dict.fromkeys(shapes))}), so items cannot be "
                "stacked; give a collate function that pads them"
            ) from error
        said = str(error).partition("\n")[0]
        raise DataError(
            f"{name!r} cannot be stacked ({said}); make it of one shape and of one format that "
            "torch has, or give a collate function"
        ) from error
    if stacked is None:
        raise DataError(
            f"{name!r} is a {type(values[0]).__name__}, no array, tensor or number; leave it out "
            "of the items, or give a collate function"
        )
    return stacked.float() if stacked.dtype == torch.float64 else stacked


def _some(values: Iterable[Any]) -> str:
    """The first few."""
    first = list(map(str, islice(values, 5)))
    return ", ".join([*first[:4], *(["…"] if len(first) > 4 else [])])


def _checked(batch: Any) -> Batch:
    if not isinstance(batch, Mapping):
        raise DataError(f"collate gives a {type(batch).__name__}, no mapping of names to tensors")
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise DataError(f"collate gives {name!r} as a {type(value).__name__}, not as a tensor")
    return dict(batch)


def count_of(batch: Mapping[str, torch.Tensor], samples: int, *, shifted: bool = False) -> int:
    """Over how many things the mean loss of a batch is taken: its `labels`, if they are integers,
    without IGNORED_LABEL and, if `shifted`, the first of each sample; else its samples."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return samples
    return int((labels[..., 1 if shifted else 0 :] != IGNORED_LABEL).sum())


def fingerprint(name: str, options: Mapping[str, Any], size: int, of_data: str | None) -> str:
    """What tells a data set from others: the name and options of its factory, its size, and what it
    says of itself, if anything."""
    parts = [ORDER_VERSION, name, dict(options), size, of_data]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return f"samples:{size}:{digest}"


def size_in(found: str) -> int:
    """How many samples the data set of a `fingerprint` has; 0 if it is that of another stream."""
    kind, _, rest = found.partition(":")
    return int(rest.partition(":")[0]) if kind == "samples" else 0
