"""The user's own data: what stands at a position, and what is told of what does not fit."""

import random
import sys
from collections import namedtuple

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from trainer.data.loader import load
from trainer.data.sample_stream import SampleStream, count_of, fingerprint, size_in, stack
from trainer.data.shards import DataError
from trainer.data.stream import CONSUMED, COUNTED

SIZE = 50


class Noisy:
    """Items that draw from every source of random numbers."""

    def __len__(self):
        return SIZE

    def __getitem__(self, number):
        if number >= SIZE:
            raise IndexError(number)
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"number": number, "noise": np.array(noise), "row": torch.arange(3) + number}


def stream(dataset, shuffle=True, collate=None, seed=7):
    return SampleStream("the set", dataset, collate, seed=seed, shuffle=shuffle)


def for_forward(arguments, dataset, collate=None):
    made = stream(dataset, shuffle=False, collate=collate)
    made.arguments = arguments
    return made


def fetched(made, cuts):
    parts = [made.fetch(cut) for cut in cuts]
    return {name: torch.cat([part[name] for part in parts]) for name in ("number", "noise", "row")}


def test_an_item_is_a_function_of_its_position():
    whole = fetched(stream(Noisy()), [range(2 * SIZE)])
    torch.manual_seed(1)
    parts = fetched(stream(Noisy()), [range(60, 100), range(5), range(5, 60)])
    order = [*range(60, 100), *range(60)]
    for name, values in parts.items():
        assert torch.equal(values, whole[name][order]), name
    first, second = whole["number"].split(SIZE)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(SIZE))
    assert not torch.equal(first, second)
    assert whole["noise"].unique().numel() == 3 * 2 * SIZE, "an epoch repeats the noise of another"
    assert whole["noise"].dtype == torch.float32
    assert whole["row"].dtype == whole["number"].dtype == torch.int64


def test_workers_give_what_no_worker_gives():
    def batches(workers):
        requests = [[0, 3], [4, 1, 2]]
        loaded = load(stream(Noisy()), requests, workers=workers, pin_memory=False, account=True)
        return [
            (batch[CONSUMED], batch[COUNTED], batch["noise"].tolist()) for batch in list(loaded)
        ]

    alone = batches(0)
    assert batches(2) == alone
    assert [count for _, count, _ in alone] == [2, 3]
    whole = stream(Noisy()).fetch_with_digest(range(5))[1]
    assert sum(digest[0] for digest, _, _ in alone) % 2**32 == whole[0]


def test_a_validation_set_comes_in_its_own_order():
    batch = stream(Noisy(), shuffle=False).fetch(range(SIZE))
    assert batch["number"].tolist() == list(range(SIZE))


class Counted(IterableDataset):
    """Says how much it gives, and gives no sample by its number."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([{"x": 1}] * 4)


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        ([[0.0, 1]] * 4, "an item is a list; all items must be mappings .*samples 0, 1, 2"),
        ([{"x": 1}, (1,), (2,)], "an item is a tuple, another a dict; all items must be mappings"),
        ([(1, 2), (1,), (1, 2)], "items are tuples of 2, 1 parts"),
        ([(1, 2, 3)] * 4, "an item has 3 parts, .* but forward takes x, y; give mappings"),
        ([(1.0, "word")] * 4, "'part 1' is a str, not an array"),
        (pandas.DataFrame({"x": [1.0], "y": [2]}), "DataFrame of columns, where .*to_dict"),
        (pandas.DataFrame([[1.0]])[0], "Series of columns, where"),
        (pyarrow.table({"x": [1.0]}), "Table of columns, where"),
        (DataLoader([1]), "DataLoader that has its own order and batches; give its data set"),
        (Counted(), "Counted without samples by number; it should be a map-style data set"),
        (np.zeros((4, 2)), "an item is a ndarray; all items must be mappings"),
        ("rows.csv", "an item is a str; all items must be mappings"),
        (
            [{"x": [0.0] * n} for n in range(1, 5)],
            r"'x' has several shapes \(\(1,\), \(2,\), \(3,\)",
        ),
        ([{"x": np.zeros(n)} for n in range(1, 5)], r"'x' has several shapes .*collate function"),
        (
            [{"x": torch.zeros(n)} for n in range(1, 5)],
            r"'x' has several shapes .*collate function",
        ),
        ([{"x": torch.zeros(())}, {"x": 1.0}, {"x": 1.0}], "'x' cannot be stacked .*but got float"),
        ([{"x": [[1], [1, 2]]}] * 4, "'x' cannot be stacked .*inhomogeneous"),
        ([{"x": np.zeros(3, np.longdouble)}] * 4, "'x' cannot be stacked .*one dtype that torch"),
        ([{"x": "word"}] * 4, "'x' is a str, not an array"),
        ([{"x": None}] * 4, "'x' is a NoneType, not an array"),
        ([{"x": 1}, {"y": 1}, {"x": 1}], "items have x, and y"),
        (type("Set", (), {"__getitem__": 1})(), "Set without __len__"),
        (iter([1]), "iterator without __"),
        ({"train": [1], "test": [2]}, r"dict of train, test; choose.*Samples\("),
        ([], "holds no sample"),
    ],
)
def test_what_is_no_such_data_is_told_in_a_line(dataset, what):
    with pytest.raises(DataError, match=what) as found:
        for_forward(["x", "y"], dataset).fetch(range(3))
    assert "\n" not in str(found.value)
    assert str(found.value).startswith("data.factory: the set")


Pair = namedtuple("Pair", ["y", "x"])


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        ([(np.full(3, n), n) for n in range(4)], None),
        ([(torch.full((3,), n), n) for n in range(4)], default_collate),
        (TensorDataset(torch.arange(4).expand(3, 4).t(), torch.arange(4)), None),
        ([Pair(n, [n] * 3) for n in range(4)], None),
        (pandas.DataFrame({"x": range(4), "y": range(4)}).to_dict("records"), None),
    ],
)
def test_what_stands_in_tuples_goes_to_forward_in_order(dataset, collate):
    batch = for_forward(["x", "y", "weights"], dataset, collate).fetch([1, 2])
    assert batch.keys() == {"x", "y", COUNTED}
    assert batch["y"].tolist() == [1, 2]
    assert batch["x"].view(2, -1)[:, 0].tolist() == [1, 2]


def test_a_set_of_the_library_datasets_is_one_of_those():
    import datasets  # which takes a second

    rows = [{"x": [n] * 3, "y": n} for n in range(4)]
    test_what_stands_in_tuples_goes_to_forward_in_order(datasets.Dataset.from_list(rows), None)


def test_what_collate_gives_is_looked_at():
    with pytest.raises(DataError, match="collate gives a str; it must give a mapping"):
        stream([1, 2], collate=str).fetch([0])
    with pytest.raises(DataError, match="collate gives 'x' as a list; it must give a tensor"):
        stream([1, 2], collate=lambda items: {"x": items}).fetch([0])


def broken(items):
    raise KeyError("pixels")


def test_what_fails_in_the_user_s_code_is_told_with_its_line():
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(DataError, match=f"collate fails at {__file__}:{line}: KeyError: 'pixels'"):
        stream([1, 2], collate=broken).fetch([0])

    class Holes(Noisy):
        def __getitem__(self, number):
            raise ValueError(f"sample {number} is torn")

    with pytest.raises(DataError, match=rf"sample 3 fails at {__file__}:\d+: ValueError: sample 3"):
        stream(Holes(), shuffle=False).fetch([3])

    class Leaving(Noisy):
        def __getitem__(self, number):
            sys.exit()

    with pytest.raises(DataError, match=r"sample 3 fails at .* SystemExit"):
        stream(Leaving(), shuffle=False).fetch([3])

    class Away(Noisy):
        def __getitem__(self, number):
            raise ConnectionError("the store is gone")

    with pytest.raises(ConnectionError):  # another start may find it
        stream(Away()).fetch([3])


def test_labels_that_are_ignored_do_not_count():
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    assert count_of({"labels": labels}, 2) == 2
    assert count_of({"labels": labels.float()}, 2) == 2, "numbers to be predicted: samples"
    assert count_of({"label": labels}, 2) == 2
    assert count_of({"labels": torch.tensor([3, 4, 0])}, 3) == 3
    assert count_of({"labels": labels}, 2, shifted=True) == 1
    made = stream([{"labels": [7, -100]}] * 3)
    made.shifted = True
    nothing = made.fetch(range(2))
    assert nothing[COUNTED] == 0
    assert (nothing["labels"][:, 1:] != -100).sum() == 1, "the mean over nothing would be NaN"


def test_stack_keeps_what_has_a_format():
    batch = stack([{"a": np.uint8(3), "b": True, "c": 1.5, "d": torch.ones(2).bfloat16()}] * 2)
    dtypes = {name: tensor.dtype for name, tensor in batch.items()}
    expected = torch.uint8, torch.bool, torch.float32, torch.bfloat16
    assert dtypes == dict(zip("abcd", expected, strict=True))


def test_a_fingerprint_tells_data_apart():
    one = fingerprint("m:f", {"path": "a"}, 5, None)
    assert one == fingerprint("m:f", {"path": "a"}, 5, None)
    others = [
        ("m:g", {"path": "a"}, 5, None),
        ("m:f", {}, 5, None),
        ("m:f", {"path": "a"}, 6, None),
    ]
    others += [("m:f", {"path": "a"}, 5, "x")]
    assert one not in [fingerprint(*other) for other in others]
    assert size_in(one) == 5
