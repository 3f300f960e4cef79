"""Which state a step is computed from, how far, and what counts as a difference; without ranks."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from elastic.record.attempt import (
    LedgerRollbackLine,
    LedgerStepLine,
    LedgerStepLines,
    RecordedAttempt,
)
from elastic.record.history import LedgerError
from elastic.record.ledger import StartLine
from trainer.data.loader import TokenStream
from trainer.data.prepare.prepare import prepare
from trainer.data.stream import COUNTED, IGNORED_LABEL
from trainer.tools.replay.compared import ReplayNumbers, differences, other_means, unrecorded
from trainer.tools.replay.lineage import ReplayLineage, ReplaySpan, beginning, draw, drawn
from trainer.tools.replay.why import by_document, parts_of


def attempt(number, begin, end, recipe="a", saves=(), rollbacks=()):
    start = StartLine(step=begin, sequences=8 * begin, global_batch=8, world_size=2, recipe=recipe)
    steps = LedgerStepLines()
    for n in range(begin + 1, end + 1):
        steps.append(LedgerStepLine(n, 8 * n - 8, 8 * n, 1.0, 1.0, "", n))
    told = [
        {"step": step, "ok": True, "weights": f"w{step}", "moments": f"m{step}"} for step in saves
    ]
    backs = [LedgerRollbackLine(after, to, "storage", after, 1) for after, to in rollbacks]
    return RecordedAttempt(number, start, 1, steps=steps, saves=told, rollbacks=backs)


LINEAGE = ReplayLineage(
    [
        # Steps 11 to 14 of the first were done in vain.
        (attempt(1, 0, 14, saves=(5, 10, 12), rollbacks=((7, 5), (14, 12))), 10),
        (attempt(2, 10, 20, saves=(15, 20)), 20),
        (attempt(3, 20, 23, recipe="b"), 23),
    ]
)


def test_the_line_knows_who_did_what():
    assert LINEAGE.last == 23
    assert [LINEAGE.attempt_of(step).number for step in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
    assert sorted(LINEAGE.digests) == [5, 10, 15, 20]
    assert LINEAGE.rollbacks == {7: 5}
    assert LINEAGE.stretch(3, 23) == (LINEAGE.attempts[0][0], 20)
    assert LINEAGE.stretch(12, 14) == (LINEAGE.attempts[1][0], 14)
    assert LINEAGE.stretch(21, 23)[0].number == 3
    for step in (0, 24):
        with pytest.raises(LedgerError, match=f"step {step}: .*steps 1 to 23"):
            LINEAGE.attempt_of(step)


@pytest.mark.parametrize(
    ("stored", "step", "begin"),
    [
        ((), 9, 0),
        ((5, 10), 10, 5),
        ((5, 10), 11, 10),
        ((6,), 7, 6),
        # What a roll-back goes back to is stored, or passed on the way.
        ((6,), 8, 0),
        ((5, 6), 8, 6),
        ((4,), 8, 4),
        # It was done before this state was saved.
        ((7,), 8, 7),
    ],
)
def test_a_step_is_computed_from_the_nearest_state(stored, step, begin):
    assert beginning(LINEAGE, stored, step) == begin


def test_an_audit_ends_in_a_save_and_computes_nothing_twice():
    assert drawn(LINEAGE, (5, 10, 15, 20), [3, 8, 9, 16]) == [
        ReplaySpan(0, 5),
        ReplaySpan(5, 10),
        ReplaySpan(15, 20),
    ]
    assert drawn(LINEAGE, (), [3, 16, 22]) == [ReplaySpan(0, 23)]
    assert drawn(LINEAGE, (20,), [22]) == [ReplaySpan(20, 23)]
    # It also ends in a checkpoint of which the ledger has no digest.
    assert drawn(LINEAGE, (20, 22), [21]) == [ReplaySpan(20, 22)]
    assert draw(LINEAGE, 5, 7) == draw(LINEAGE, 5, 7) != draw(LINEAGE, 5, 8)
    assert draw(LINEAGE, 99, 1) == [*range(1, 24)]


STEP = LedgerStepLine(4, 24, 32, 1.0, 1.0, "", 9, loss=2.0, norm=0.5, consumed="ab")
GOOD = ReplayNumbers(2.0, 0.5, "", "ab")


@pytest.mark.parametrize(
    ("found", "proof", "told"),
    [
        (GOOD, "bits", []),
        (
            ReplayNumbers(math.nextafter(2.0, 3), 0.5, "", "ab"),
            "bits",
            ["its loss is 2.0000000000000004"],
        ),
        (ReplayNumbers(2.00001, 0.50004, "", "ab"), "rounding", []),
        (
            ReplayNumbers(2.0004, 0.5, "", "ab"),
            "rounding",
            ["its loss is 2.0004, and the ledger says"],
        ),
        (ReplayNumbers(2.0, 0.5006, "", "ab"), "rounding", ["its norm"]),
        (ReplayNumbers(9.0, 0.5, "", "ab"), "none", []),
        (ReplayNumbers(9.0, 0.5, "", "cd"), "none", ["it consumed cd, and the ledger says ab"]),
        (
            ReplayNumbers(math.nan, math.nan, "loss", "ab"),
            "rounding",
            ["it is skipped for its loss, and the ledger says kept", "its loss", "its norm"],
        ),
    ],
)
def test_what_differs_is_said(found, proof, told):
    said = list(differences(found, STEP, proof, 1e-4))
    assert [one.startswith(begin) for one, begin in zip(said, told, strict=True)] == [True] * len(
        told
    ), said


def test_what_is_not_finite_is_alike():
    line = STEP._replace(loss=math.nan, norm=math.inf, skipped="loss")
    assert not list(differences(ReplayNumbers(math.inf, math.nan, "loss", "ab"), line, "bits", 0))
    assert list(differences(ReplayNumbers(2.0, math.nan, "loss", "ab"), line, "bits", 0))


def test_what_a_line_lacks_is_not_taken_for_compared():
    assert unrecorded(GOOD, STEP) == []
    assert unrecorded(GOOD, STEP._replace(loss=None, consumed=None)) == ["loss", "consumed"]
    assert unrecorded(ReplayNumbers(2.0, 0.5, "", None), STEP._replace(consumed=None)) == []


@pytest.mark.parametrize(
    ("recorded", "proof", "told"),
    [
        ({"validation_loss": 2.0 + 1e-12, "recall": 0.5}, "bits", []),
        ({"validation_loss": 2.0 + 1e-7, "recall": 0.5}, "bits", ["its validation_loss is 2.0"]),
        ({"validation_loss": 2.0}, "bits", ["its recall is 0.5, and the ledger says nan"]),
        ({"validation_loss": None, "recall": 0.5}, "rounding", ["its validation_loss"]),
        ({"validation_loss": 2.00001, "recall": 0.4}, "rounding", []),
        ({"validation_loss": 2.001, "recall": 0.5}, "rounding", ["its validation_loss"]),
        ({"validation_loss": 9.0, "recall": 0.5}, "none", []),
    ],
)
def test_other_means_over_the_validation_set_are_said(recorded, proof, told):
    said = list(other_means({"validation_loss": 2.0, "recall": 0.5}, recorded, proof, 1e-4))
    assert [one.startswith(begin) for one, begin in zip(said, told, strict=True)] == [True] * len(
        told
    ), said


def test_each_label_of_a_step_counts_for_one_document(tmp_path):
    """A document that lies in several sequences is one; one of five letters is there, too."""
    texts = ["a" * 70, "short", "b" * 40]
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare([str(tmp_path / "texts.jsonl")], tmp_path / "data", tokenizer="bytes",
            validation_fraction=0.0)  # fmt: skip
    stream = TokenStream.open(
        [(tmp_path / "data", 1.0)], split="train", seq_len=32, seed=1, shuffle=False
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "data/tokenizer.json"))
    parts = parts_of(stream, range(stream.sequences), lambda source: tokenizer)
    assert stream.sequences == 3
    assert [part.number for part in parts] == [0, 1, 2]
    # the first token of all is no label; each text ends in a token that has no text
    assert [part.count for part in parts] == [70, 6, 20]
    assert [part.bytes for part in parts] == [69, 5, 20]
    assert [[at for at, _ in part.sequences] for part in parts] == [[0, 1, 2], [2], [2]]
    labels = sum((batch["labels"] != IGNORED_LABEL).int() for _, batch in parts[0].sequences)
    assert labels.sum() == 70


def test_a_pair_is_computed_as_if_it_were_alone_in_its_sequence():
    batch = {
        "labels": torch.tensor([[1, 2, 3, 4, 5, 6, 7, IGNORED_LABEL]]),
        "segments": torch.tensor([[0, 0, 1, 1, 2, 3, 3, 3]]),
        "answer_labels": torch.tensor([2, 2, 1, 2]),
        "reference": torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        COUNTED: 2,
    }
    documents = np.array([4, 4, 5, 5, 8, 9, 9, -1])
    (first, one), (second, other) = by_document(documents, batch, paired=True)
    assert (first, second) == (4, 8)
    assert one["labels"].tolist() == [[1, 2, 3, 4, *[IGNORED_LABEL] * 4]]
    assert other["labels"].tolist() == [[*[IGNORED_LABEL] * 4, 5, 6, 7, IGNORED_LABEL]]
    assert one["segments"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert other["segments"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 0]]
    assert [each["answer_labels"].tolist() for each in (one, other)] == [[2, 2], [1, 2]]
    assert [each["reference"].tolist() for each in (one, other)] == [[-1, -2], [-3, -4]]
    assert one[COUNTED] == other[COUNTED] == 1
