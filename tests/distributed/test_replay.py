"""Steps of real runs computed again: the same bits on other ranks, what explains a step, and an
audit that finds each forgery. Nothing in the run changes."""

import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
from isal.isal_zlib import crc32
from safetensors import safe_open

from benchmarks.support import python_path
from checkpointing.format.layout import BLOCK_BYTES, COMMIT_RECORD, CommitRecord, FileRecord
from checkpointing.storage.steps import read_record
from checkpointing.tools.digests import stored_digests
from elastic.record.history import read_history
from tests.distributed.forged import change_token, opened, seal
from tests.distributed.jobs import MOE, ROOT, SOAK, Job, soak, starts, wait_for_step
from trainer.cli.main import parse
from trainer.data.loader import TokenStream, later_stages
from trainer.data.prepare.prepare import prepare
from trainer.recipe import RecipeError, load_recipe
from trainer.run.provenance import digest_of, recipe_file
from trainer.tasks.task import build_task
from trainer.tools.replay.lineage import OUTCOME, REQUEST, ReplayRequest, ReplaySpan

SAVED = ("checkpoint.when_busy=wait", "checkpoint.keep=0")
EXACT = ("run.determinism=exact", "schedule={name: constant}", *SAVED)
BIT_BY_BIT = "loss, norm and verdict are those of the ledger, to the last bit"
NOISE = "QXZJKVWqxzjkvw0123456789#@%&*~^"
LISTS = (
    "highest loss a token",
    "highest loss a byte",
    "largest gradient of its own",
    "largest share of the gradient",
)
HOLDS = "the ledger holds: what was computed again is what it says"


def contents(folder):
    """A digest of every file, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def trained(workspace):
    """trained(ranks, *overrides): a run to the end."""

    def trained(ranks, *overrides, **options):
        code, output = Job(workspace, ranks, overrides, **options).wait()
        assert code == 0, output
        return output

    return trained


@pytest.fixture
def replay(workspace):
    """replay(run, *words) → (exit code, output)."""

    def replay(run, *words):
        return Job(workspace, 1, words, recipe=str(run), program=("trainer.cli", "replay")).wait()

    return replay


def problems(output):
    return [line for line in output.splitlines() if line.startswith("problem: ")]


def rewritten(run, change):
    """Give the ledger of a run the lines that change(its lines) returns."""
    path = run / "ledger.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def edited(run, step, kind="step", **changes):
    """The ledger of a run with other fields in the line of a step; None takes one away."""

    def edit(line):
        if (line["kind"], line.get("step")) == (kind, step):
            line = {key: value for key, value in {**line, **changes}.items() if value is not None}
        return line

    rewritten(run, lambda lines: [*map(edit, lines)])


def loss_of(run, step):
    lines = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    return next(one["loss"] for one in lines if one["kind"] == "step" and one["step"] == step)


# --- forgeries -------------------------------------------------------------------------------


def of_recipe(old, new, *, whole=False):
    """The recipe of a run is another; `whole`: under the digest that this one has."""

    def forge(run):
        (start,) = starts(run.parent, run.name)
        path = recipe_file(run, start["recipe"])
        text = path.read_text()
        assert old in text
        text = text.replace(old, new)
        path.write_text(text)
        if whole:
            (run / "recipe.yaml").write_text(text)
            path.rename(recipe_file(run, digest_of(text)))
            ledger = run / "ledger.jsonl"
            ledger.write_text(ledger.read_text().replace(start["recipe"], digest_of(text)))

    return forge


def of_token(*, sealed=False, claimed=False, consumed=False):
    """A token that step 3 took is another; as is the index; and what the ledger says of both."""

    def forge(run):
        stream = change_token(run, 3, sealed=sealed, claimed=claimed)
        if consumed:
            digest = stream.fetch_with_digest(range(16, 24))[1]
            edited(run, 3, consumed=f"{digest[0]:08x}{digest[1]:08x}")

    return forge


def of_state(step, section, *, claimed=False, zeroed=False, untold=False):
    """A number in the checkpoint of a step is another, with the checksums that it then has;
    `zeroed`: all numbers of its tensor are 0; `claimed`: and the ledger says what digest that has;
    `untold`: or it says of no digest."""

    def forge(run):
        path = run / f"checkpoints/step-{step:08}"
        (file,) = path.glob("optimizer/*.safetensors" if section == "optimizer" else "model-*")
        with safe_open(file, "pt") as tensors:
            name = next(n for n in tensors.keys() if tensors.get_slice(n).get_shape()[1:])  # noqa: SIM118
        blob = bytearray(file.read_bytes())
        length = 8 + int.from_bytes(blob[:8], "little")
        begin, end = json.loads(blob[8:length])[name]["data_offsets"]
        numbers = np.frombuffer(blob, np.float32, (end - begin) // 4, length + begin)
        numbers[:] = 0 if zeroed else numbers
        numbers[0] = numbers[0] * 1.5 + 1e-3
        file.write_bytes(blob)
        record = read_record(path)
        sums = tuple(crc32(blob[at : at + BLOCK_BYTES]) for at in range(0, len(blob), BLOCK_BYTES))
        files = {**record.files, str(file.relative_to(path)): FileRecord(len(blob), sums)}
        (path / COMMIT_RECORD).write_bytes(CommitRecord(step, files, record.odd).encode())
        if claimed:
            edited(run, step, "save", **stored_digests(path)._asdict())
        if untold:
            edited(run, step, "save", weights=None, moments=None)

    return forge


def of_bit(run):
    (file,) = (run / "checkpoints/step-00000002").glob("model-*")
    blob = bytearray(file.read_bytes())
    blob[-101] ^= 1
    file.write_bytes(blob)


def skip_invented(run):
    """Step 3 was skipped, says the ledger: with the number and the counters that go with it."""

    def skip(line):
        if (line["kind"], line.get("step")) == ("step", 3):
            line |= {"loss": None, "skipped": True, "why": "loss"}
        if line["kind"] in ("save", "end") and line["step"] >= 3:
            line["skipped"] += 1
        return line

    rewritten(run, lambda lines: [*map(skip, lines)])


def line_removed(run, kind="step", step=3):
    rewritten(
        run, lambda lines: [one for one in lines if (one["kind"], one.get("step")) != (kind, step)]
    )


def of_steps(*fields, begin=2):
    """The lines of two steps are swapped; or only these fields of them."""

    def swap(lines):
        first, second = (
            next(n for n, one in enumerate(lines) if (one["kind"], one.get("step")) == ("step", s))
            for s in (begin, begin + 1)
        )
        for key in fields:
            lines[first][key], lines[second][key] = lines[second][key], lines[first][key]
        if not fields:
            lines[first], lines[second] = lines[second], lines[first]
        return lines

    return lambda run: rewritten(run, swap)


def zeroed_and_claimed(run):
    of_state(4, "optimizer", zeroed=True, claimed=True)(run)


def state_untold(run):
    """The newest checkpoint holds moments of zeros, and the ledger knows nothing of its save."""
    of_state(4, "optimizer", zeroed=True)(run)
    line_removed(run, "save", 4)


FORGERIES = {
    "loss": lambda run: edited(run, 3, loss=loss_of(run, 3) - 0.01),
    "consumed": lambda run: edited(run, 3, consumed="0" * 16),
    "line removed": line_removed,
    "consumed removed": lambda run: edited(run, 3, consumed=None),
    "marked skipped": lambda run: edited(run, 3, skipped=True, why="loss"),
    "marked skipped, with number and counters": skip_invented,
    "recipe: rate": of_recipe("lr: 0.003", "lr: 0.004"),
    "recipe: rate, under its digest": of_recipe("lr: 0.003", "lr: 0.004", whole=True),
    "recipe: seed": of_recipe("seed: 7", "seed: 8"),
    "recipe: seed, under its digest": of_recipe("seed: 7", "seed: 8", whole=True),
    "token": of_token(),
    "token, sealed": of_token(sealed=True),
    "token, sealed, claimed": of_token(sealed=True, claimed=True),
    "token, sealed, claimed, consumed": of_token(sealed=True, claimed=True, consumed=True),
    "checkpoint: a bit": of_bit,
    "checkpoint: weights": of_state(2, "model"),
    "checkpoint: moments": of_state(2, "optimizer"),
    "checkpoint: weights, claimed": of_state(2, "model", claimed=True),
    "checkpoint: moments, claimed": of_state(2, "optimizer", claimed=True),
    "newest checkpoint: moments, claimed": of_state(4, "optimizer", claimed=True),
    "newest checkpoint: weights, without digests": of_state(4, "model", untold=True),
    "newest checkpoint: moments zeroed, claimed": zeroed_and_claimed,
    "newest checkpoint: moments zeroed, without a save": state_untold,
    "two lines swapped": of_steps(),
    "loss and norm of two steps swapped": of_steps("loss", "norm"),
    "validation": lambda run: edited(run, 4, "validation", values={"validation_loss": 1.0}),
}
QUICKLY_FOUND = (
    "consumed removed", "recipe: rate", "recipe: seed", "token, sealed", "two lines swapped",
    "token, sealed, claimed, consumed", "newest checkpoint: weights, without digests", "validation",
)  # fmt: skip
"""Of these, three are computed."""


def poison(data, position):
    """Noise is what the sequence at a position holds; returns the document that it is of."""
    stream, draw = opened(data), random.Random(5)
    (sample,) = stream.locate([position])[1]
    shard = data / "train-00000.tokens"
    tokens = np.fromfile(shard, "<u2")
    tokens[sample * 32 : sample * 32 + 32] = [ord(draw.choice(NOISE)) for _ in range(32)]
    tokens.tofile(shard)
    seal(data)
    (document,) = set(stream.documents_of(position)[1].tolist())
    return document


def test_a_step_is_explained_and_an_audit_finds_each_forgery(workspace, trained, tmp_path, capsys):
    """On one rank; the run had two."""

    def replayed(run, *words):
        arguments = parse(("replay", str(run), *words))
        return arguments.run(arguments), capsys.readouterr().out

    shutil.copytree(workspace / "data", tmp_path / "data")
    poisoned = poison(tmp_path / "data", position=27)
    run, data = tmp_path / "run", f"data.sources=[{{path: {tmp_path / 'data'}}}]"
    given = ("run.steps=4", "run.evaluate_every=4", "checkpoint.every=2")
    trained(2, f"run.dir={run}", data, *EXACT, *given)
    before = contents(run)
    code, output = replayed(run, "--step", "4", "--why")
    assert code == 0, output
    assert BIT_BY_BIT in output
    assert "2 step(s) to compute, after step 2, on 1 rank(s)" in output
    (shares,) = re.findall(r"share of the gradient \(all together (.*)%\)", output)
    assert abs(float(shares) - 100) < 0.1
    for title in LISTS:
        (row,) = re.findall(rf"^{title}.*\n.*\n(.*)", output, re.MULTILINE)
        assert re.search(rf" of data +{workspace}/corpus/0\d\d\.txt:1 ", row), row
    (row,) = re.findall(r"^highest loss a byte.*\n.*\n(.*)", output, re.MULTILINE)
    assert re.search(rf" {poisoned} of data ", row), output
    assert re.search(r"^  → +4 +\d", output, re.MULTILINE)
    assert contents(run) == before
    with pytest.raises(RecipeError, match=r"--nproc 9: .* leaves 1 of 9 .* without work"):
        replayed(run, "--step", "4", "--nproc", "9")

    # All steps, so that each checkpoint is computed into; or the last two.
    words = ("--audit", "4") if SOAK else ("--audit", "1", "--seed", "0")
    for forgery in ("none", *(FORGERIES if SOAK else QUICKLY_FOUND)):
        folder = tmp_path / forgery
        forged = folder / "run"
        shutil.copytree(run, forged)
        shutil.copytree(tmp_path / "data", folder / "data")
        FORGERIES.get(forgery, lambda run: None)(forged)
        code, output = replayed(forged, *words, "--data", str(folder / "data"))
        assert code == (forgery != "none"), f"{forgery}: {output}"
        assert bool(problems(output)) == (forgery != "none"), f"{forgery}: {output}"


# --- in `make soak` --------------------------------------------------------------------------


@pytest.fixture
def by_ranks(workspace, tmp_path, monkeypatch):
    """by_ranks(run, ranks, span, examined) → (what the ranks leave, output): without a launcher."""

    def by_ranks(run, ranks, span, examined):
        scratch = tmp_path / f"{random.random()}"
        scratch.mkdir()
        request = ReplayRequest(
            str(workspace / run),
            str(scratch),
            "cpu",
            60,
            [span],
            examined=examined,
            secret="ab" * 32,
        )
        monkeypatch.setenv(REQUEST, request.to_json())
        job = Job(workspace, ranks, recipe="-", program=("trainer.tools.replay.recompute",))
        code, output = job.wait()
        assert code == 0, output
        return json.loads((scratch / OUTCOME).read_text()), output

    return by_ranks


@soak
@pytest.mark.timeout(1800)
def test_ten_of_300_steps_have_the_same_bits_on_one_to_four_ranks(workspace, trained, by_ranks):
    for steps in range(60, 301, 60):  # five starts: a job has two minutes
        trained(2, "run.dir=long", *EXACT, f"run.steps={steps}", "checkpoint.every=10")
    before = contents(workspace / "long")
    for step in random.Random(41).sample(range(1, 301), 10):
        span, seen = ReplaySpan((step - 1) // 10 * 10, step), set()
        for ranks in (1, 2, 3, 4):
            outcome, output = by_ranks("long", ranks, span, step)
            assert outcome == {"problems": [], "missing": [], "errors": []}
            assert BIT_BY_BIT in output
            seen.add(tuple(re.findall(r"^  (?:loss|gradient).*", output, re.MULTILINE)))
        assert len(seen) == 1, seen
        print(step, *seen.pop(), sep="\n")
    assert contents(workspace / "long") == before


POISONED = """
import torch
from torch import nn


class Model(nn.Module):
    '''A bigram table whose loss is NaN for inputs of one sum.'''

    def __init__(self, bad):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(257, 257)])
        self.bad = bad

    def forward(self, input_ids, labels, document_ids=None):
        logits = self.layers[0](input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss * float("nan") if int(input_ids.sum()) == self.bad else loss}


def build(bad):
    return Model(bad)
"""


@soak
@pytest.mark.timeout(900)
def test_honest_runs_pass(workspace, trained, replay):
    """With another rate since a start, on other ranks, with a roll-back, with experts, and fast."""

    def passes(run, *words, told):
        before = contents(workspace / run)
        code, output = replay(run, *words)
        print(output)
        assert code == 0, output
        assert told in output
        assert contents(workspace / run) == before

    # Another rate after step 7, of which there is no checkpoint any more.
    trained(2, "run.dir=resumed", *EXACT, "run.steps=7", "checkpoint.every=3")
    later = ("run.dir=resumed", *EXACT, "optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.99]")
    trained(3, *later, "run.steps=12", "checkpoint.every=4")
    shutil.rmtree(workspace / "resumed/checkpoints/step-00000007")
    passes("resumed", "--step", "10", told=BIT_BY_BIT)
    passes("resumed", "--audit", "99", told=HOLDS)
    for step in (3, 6, 8):
        shutil.rmtree(workspace / f"resumed/checkpoints/step-{step:08}")
    passes("resumed", "--audit", "99", "--nproc", "2", told=HOLDS)

    experts = (*MOE, "run.dir=experts", *EXACT, "run.steps=8", "checkpoint.every=3")
    trained(2, *experts)
    passes("experts", "--audit", "99", told=HOLDS)
    passes("experts", "--step", "5", "--why", told=BIT_BY_BIT)

    # Sums of the inputs of each pass of step 6, whose numbers are not finite.
    (workspace / "poisoned.py").write_text(POISONED)
    stream = TokenStream.open(
        [(workspace / "data", 1.0)], split="train", seq_len=32, seed=7, shuffle=True
    )
    bad = int(stream.fetch([40, 41])["input_ids"].sum())
    recipe = (workspace / "recipe.yaml").read_text()
    head, rest = recipe.split("model:\n")
    model = f"model: {{factory: 'poisoned:build', factory_options: {{bad: {bad}}}}}\n"
    (workspace / "poisoned.yaml").write_text(head + model + rest[rest.index("data:") :])
    back = ("run.dir=back", *SAVED, "elastic.max_skipped_steps=0", "checkpoint.every=2")
    output = trained(1, *back, "run.steps=10", "schedule={}", recipe="poisoned.yaml")
    assert "rolled back to the weights of step 4" in output
    passes("back", "--audit", "99", told=HOLDS)
    passes("back", "--step", "9", told=BIT_BY_BIT)
    for step in (2, 4, 8):  # those of step 6 need those of step 4, which now come from step 0
        shutil.rmtree(workspace / f"back/checkpoints/step-{step:08}")
    passes("back", "--audit", "99", told=HOLDS)
    passes("back", "--step", "6", told=BIT_BY_BIT)

    trained(2, "run.dir=fast", *SAVED, "run.steps=8", "checkpoint.every=3")
    passes("fast", "--step", "8", "--nproc", "2", told=BIT_BY_BIT)
    passes("fast", "--step", "8", "--nproc", "1", told="but for rounding")
    passes("fast", "--audit", "99", told=HOLDS)


TP, PP, EXACTLY = "strategy.tp=2", "strategy.pp=2", "run.determinism=exact"


@soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, (TP,)),
        (2, (TP, "strategy.sequence_parallel=true", EXACTLY)),
        (2, (PP,)),
        (2, (PP, EXACTLY)),
        (4, (TP, PP, EXACTLY)),
        (2, ("strategy.cp=2", EXACTLY)),
        (2, (*MOE, "strategy.ep=2")),
        (2, ("batch.balance=speed", "strategy.name=ddp", EXACTLY)),
    ],
)
def test_each_layout_is_computed_again(workspace, trained, replay, tmp_path, ranks, layout):
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(workspace / "data", data)
    poisoned = poison(data, position=27)
    few = ("run.steps=4", "checkpoint.every=2", "schedule={name: constant}", *SAVED)
    trained(ranks, f"run.dir={run}", f"data.sources=[{{path: {data}}}]", *few, *layout)
    before = contents(run)
    code, output = replay(run, "--step", "4", "--why", "--nproc", f"{ranks}")
    assert code == 0, output
    assert BIT_BY_BIT in output
    (shares,) = re.findall(r"share of the gradient \(all together (.*)%\)", output)
    assert abs(float(shares) - 100) < (2 if MOE[0] in layout else 0.1)
    assert re.search(rf"^highest loss a byte:\n.*\n.* {poisoned} of data ", output, re.M), output
    code, output = replay(run, "--audit", "4", "--nproc", f"{ranks}")
    assert code == 0, output
    assert HOLDS in output
    assert contents(run) == before


@soak
def test_a_reader_that_ends_early_ends_no_replay(workspace, trained):
    """As in `perdure replay … | head -1`."""
    trained(2, "run.dir=piped", *EXACT, "run.steps=2")
    command = [sys.executable, "-m", "trainer.cli", "replay", "piped", "--step", "2", "--why"]
    command += ["--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(
        command, cwd=workspace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 0, errors
    assert "Traceback" not in errors


@soak
@pytest.mark.timeout(300)
def test_what_cannot_be_compared_is_said(workspace, trained, replay, tmp_path, monkeypatch):
    trained(1, "run.dir=apart", *EXACT, "run.steps=4", "checkpoint.every=2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    code, output = replay("apart", "--step", "3")
    assert code == 2, output
    assert "compared           not at all: it cannot be compared" in output
    why = r"^not compared: attempt 1 cannot .*: cpu was .*, and is now DEFAULT"
    assert re.search(why, output, re.M)
    code, output = replay("apart", "--audit", "2", "--nproc", "1")
    assert (code, problems(output)) == (2, []), output
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")

    (workspace / "data").rename(workspace / "moved")
    try:
        code, output = replay("apart", "--step", "3")
        assert code == 2, output
        assert "there is no data in" in output
        assert "--data" in output
        code, output = replay("apart", "--step", "3", "--why", "--data", "moved")
        assert code == 0, output
        code, output = replay("apart", "--audit", "2", "--data", "moved", "--nproc", "2")
        assert code == 0, output
    finally:
        (workspace / "moved").rename(workspace / "data")
    (run,) = starts(workspace, "apart")
    recipe_file(workspace / "apart", run["recipe"]).rename(tmp_path / "recipe.yaml")
    code, output = replay("apart", "--step", "3")
    assert code == 2, output
    assert "No such file" in output

    job = Job(workspace, 1, ("run.dir=alive", *EXACT, "run.steps=100000", "checkpoint.every=5"))
    try:
        wait_for_step(workspace, "alive", 12, job)
        code, output = replay("alive", "--step", "9")
        assert code == 0, output
        reached = read_history(workspace / "alive").step
        wait_for_step(workspace, "alive", reached + 3, job)  # it trains on
    finally:
        job.kill()


# --- a run with a past -----------------------------------------------------------------------


def with_newest_recipe(run):
    """recipe.yaml is that of the newest attempt, as the ledger has it."""
    newest = starts(run.parent, run.name)[-1]["recipe"]
    (run / "recipe.yaml").write_text(recipe_file(run, newest).read_text())


def attempt_left_out(number, *, told=False):
    """The lines of an attempt are left out; `told`: the next one goes on from the one before it."""

    def forge(run):
        begun = starts(run.parent, run.name)
        name, before = begun[number]["attempt"], begun[number - 1]["attempt"]

        def without(lines):
            kept = [line for line in lines if line["attempt"] != name]
            for line in kept if told else ():
                if line["kind"] == "start" and line["parent"] == name:
                    line["parent"] = before
            return kept

        rewritten(run, without)
        with_newest_recipe(run)

    return forge


def of_stage(*, fingerprints):
    """The weights of the first stage are others, under digests of recipes made anew;
    `fingerprints`: and under the fingerprints of the order that this makes."""

    def forge(run):
        known, orders = {}, {}
        for path in sorted((run / "recipes").iterdir()):
            text = path.read_text().replace("data: 7.0", "data: 6.0")
            assert text != path.read_text()
            path.unlink()
            new = recipe_file(run, digest_of(text))
            new.write_text(text)
            known[path.stem] = new.stem
            stream = build_task(load_recipe(new, kept=True)).stream
            orders[new.stem] = {"data": stream.fingerprint, "stages": later_stages(stream)}

        def forged(line):
            if line["kind"] == "start":
                line["recipe"] = known[line["recipe"]]
                line |= orders[line["recipe"]] if fingerprints else {}
            return line

        rewritten(run, lambda lines: [*map(forged, lines)])
        with_newest_recipe(run)

    return forge


PAST = {
    "an attempt left out": attempt_left_out(1),
    "an attempt left out, parents told": attempt_left_out(1, told=True),
    "the newest attempt left out": attempt_left_out(2),
    "a stage": of_stage(fingerprints=False),
    "a stage, and the order's fingerprints": of_stage(fingerprints=True),
}


@soak
@pytest.mark.timeout(900)
def test_an_audit_finds_each_forgery_of_a_run_with_a_past(workspace, trained, tmp_path, replay):
    """Three attempts on one and two ranks, each with another rate; the last one with another stage
    of the data, too."""
    draw, few = random.Random(2), tmp_path / "few.txt"
    few.write_text("".join(draw.choices("abcdef ", k=600)))
    prepare([str(few)], tmp_path / "few", tokenizer="bytes", validation_fraction=0.0)
    run = tmp_path / "run"
    given = (f"run.dir={run}", *EXACT, "checkpoint.every=2")
    given += (f"data.sources=[{{path: {workspace / 'data'}}}, {{path: {tmp_path / 'few'}}}]",)
    first, then = "{until: 20, weights: {data: 7, few: 3}}", "weights: {data: 1, few: 1}}"
    short, long = f"[{first}, {{{then}]", f"[{first}, {{until: 70, {then}, {{weights: {{few: 1}}}}]"
    for number, (ranks, stages) in enumerate(((2, short), (1, short), (2, long))):
        steps, rate = f"run.steps={4 * number + 4}", f"optimizer.lr={number + 1}e-3"
        trained(ranks, *given, f"data.stages={stages}", steps, rate)
    for forgery in ("none", *PAST):
        forged = tmp_path / forgery / "run"
        shutil.copytree(run, forged)
        PAST.get(forgery, lambda run: None)(forged)
        code, output = replay(forged, "--audit", "99", "--nproc", "1")
        print(forgery, *problems(output), sep="\n")
        assert code == (forgery != "none"), f"{forgery}: {output}"
        assert bool(problems(output)) == (forgery != "none"), f"{forgery}: {output}"


# --- planted documents -----------------------------------------------------------------------


def planted(texts, draw):
    """Documents that do not belong into a corpus, each with a mark: (kind, text)."""
    code = Path(json.decoder.__file__).read_text().split("\n")

    def noise(count):
        return "".join(draw.choice(NOISE) for _ in range(count))

    def text():
        return draw.choice(texts)[:350]

    def shuffled():
        some = draw.choice(texts).split()[:70]
        draw.shuffle(some)
        return " ".join(some)

    def misspelt():
        return "".join(draw.choice(ascii_lowercase) if draw.random() < 0.2 else c for c in text())

    makers = {
        "90 letters of noise": lambda: noise(90),
        "12 letters of noise": lambda: noise(12),
        "two letters repeated": lambda: "ab " * 60,
        "letters of another script": lambda: "".join(
            chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(30)
        ),
        "words in another order": shuffled,
        "five letters of noise": lambda: noise(5),
        "upper case": lambda: text().upper(),
        "one letter in five wrong": misspelt,
        "without spaces": lambda: text().replace(" ", ""),
        "without vowels": lambda: re.sub("[aeiou]", "", text()),
        "each word twice": lambda: re.sub(r"(\w+)", r"\1 \1", text()[:180]),
        "hexadecimal": lambda: draw.randbytes(80).hex(" "),
        "code": lambda: " ".join(draw.sample(code, 8)),
    }
    kinds = [(kind, make) for kind, make in makers.items() for _ in range(3)]
    return [(kind, f"ZQ{n}JX {make()}") for n, (kind, make) in enumerate(kinds)]


def english():
    """Documents of 400 letters: paragraphs of the standard library's docstrings, without code and
    drawings."""
    modules = [
        path
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        if not {"site-packages", "test", "tests"} & {*path.parts}
    ]
    found = [
        " ".join(part.split())
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for part in (ast.get_docstring(node) or "").split("\n\n")
    ]
    documents = [""]
    for text in dict.fromkeys(text for text in found if len(text) > 80 and text.isascii()):
        if sum(char.isalpha() or char in " .,'" for char in text) > 0.93 * len(text):
            documents += [""] if len(documents[-1]) >= 400 else []
            documents[-1] = f"{documents[-1]} {text}".strip()
    return documents


@soak
@pytest.mark.timeout(3600)
def test_why_names_planted_documents(workspace, trained, replay):
    draw = random.Random(5)
    texts = english()
    rows = [("", text) for text in texts]
    for row in planted(texts, draw):
        rows.insert(draw.randrange(len(rows)), row)
    corpus = workspace / "planted.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in rows))
    data = workspace / "planted"
    prepare([str(corpus)], data, train_bpe=1024, validation_fraction=0.0)
    stream = TokenStream.open([(data, 1.0)], split="train", seq_len=128, seed=7, shuffle=True)
    epoch, where = stream.sequences // 8, {}
    for position in range(epoch * 8):
        for number, count in Counter(stream.documents_of(position)[1].tolist()).items():
            if rows[number][0]:
                # number → most of its labels in one step, and that step
                where[number] = max(where.get(number, (0, 0)), (count, position // 8 + 1))
    print(f"\n{len(rows)} documents, {stream.sequences} sequences, {epoch} steps")
    for steps in (*range(50, epoch, 50), epoch):  # a job has two minutes
        trained(
            1, "run.dir=poisoned", *SAVED, "schedule={name: constant}", f"run.steps={steps}",
            "checkpoint.every=10", "batch.micro_batch=8",
            "data.sources=[{path: planted}]", "data.seq_len=128",
            "model.architecture.vocab_size=1024", "model.architecture.hidden_size=128",
            "model.architecture.intermediate_size=256",
        )  # fmt: skip
    firsts = {kind: [] for kind, _ in rows if kind}
    for number, (_, step) in sorted(where.items(), key=lambda item: item[1]):
        if step <= 20:  # any document is a surprise
            continue
        code, output = replay("poisoned", "--step", f"{step}", "--why")
        assert code == 0, output
        tables = [re.search(rf"^{title}.*\n.*\n((?: .*\n)*)", output, re.M)[1] for title in LISTS]
        own = re.compile(rf" {number} of planted +{corpus}:{number + 1} ")
        places = [
            next((place for place, row in enumerate(t.splitlines()) if own.search(row)), None)
            for t in tables
        ]
        firsts[rows[number][0]].append([*(place == 0 for place in places), places != [None] * 4])
        print(f"document {number}, {rows[number][0]}, step {step}: places {places}", flush=True)
    found = []
    for kind, hits in firsts.items():
        *by_list, shown = zip(*hits, strict=True)
        some = map(any, zip(*by_list, strict=True))
        found.append([len(hits), *map(sum, by_list), sum(some), sum(shown)])
        print(f"| {kind} |", " | ".join(map(str, found[-1])), "|")
    total, *by_list, by_some, shown = map(sum, zip(*found, strict=True))
    print(f"of {total}: {by_list} first by {LISTS}, {by_some} by some, {shown} in some list")
    assert min(by_list) >= 0.5 * total
    assert by_some >= 0.85 * total
