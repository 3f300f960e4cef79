"""Pairs of answers under the loop: the formulas of the papers at any world size, and a reference
that is computed once."""

import json
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, logsigmoid
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import (
    ROOT,
    Forked,
    assert_audited,
    losses,
    records,
    soak,
    starts,
    wait_for_step,
)
from tests.trainer.data.chat_families import PLAIN, VARIABLES, tokenizer, without_workers
from trainer.data.loader import TokenStream
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import TokenDataset
from trainer.recipe import RecipeError, load_recipe
from trainer.run.reference import FILE
from trainer.tasks.task import build_task
from trainer.tools.report.report import check

RECIPE = """\
run: {dir: pairs, steps: 6, log_every: 1, seed: 3, device: cpu}
model: {init_from: before}
objective: {name: dpo, beta: 0.2}
data: {sources: [{path: pairs-data}], seq_len: 128}
batch: {global_batch: 6, micro_batch: 1}
optimizer: {lr: 1e-3, weight_decay: 0}
schedule: {name: constant}
precision: {dtype: fp32}
checkpoint: {every: 2}
"""
ADAPTER = "model.adapter={rank: 4, base: fp32}"
EXACT = "run.determinism=exact"


@pytest.fixture(scope="module")
def folder(workspace):
    """Pairs of very different lengths, a model that they begin with, and another beside it."""
    draw = np.random.default_rng(0)
    with (workspace / "pairs.jsonl").open("w") as file:
        for number in range(40):
            sizes = (3, 30, 2) if number % 3 == 0 else (1, 2, 5)
            said = [" ".join(draw.choice(list("abcdefgh"), size)) for size in sizes]
            record = dict(zip(("prompt", "chosen", "rejected"), said, strict=True))
            file.write(json.dumps(record) + "\n")
    home = workspace / "before"
    home.mkdir(exist_ok=True)
    tokens = tokenizer()
    tokens.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({**VARIABLES, "chat_template": PLAIN}))
    config = Qwen3Config(
        vocab_size=tokens.get_vocab_size(), hidden_size=48, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    for folder in (home, workspace / "second"):
        model.save_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
    (workspace / "second" / "tokenizer.json").write_bytes((home / "tokenizer.json").read_bytes())
    with without_workers():
        options = {"tokenizer": str(home), "pairs": True, "validation_fraction": 0.2}
        prepare([str(workspace / "pairs.jsonl")], workspace / "pairs-data", **options)
    (workspace / "pairs.yaml").write_text(RECIPE)
    return workspace


def answers_of(folder, split="train"):
    """(ids, trained) of each answer."""
    dataset, start = TokenDataset(folder / "pairs-data", split), 0
    for length in dataset.lengths().tolist():
        trained = torch.from_numpy(dataset.read_trained(start, length))
        yield torch.from_numpy(dataset.read(start, length).astype(np.int64)), trained
        start += length


def log_probs(model, answers):
    """(log-probability, tokens) of each answer, which is given to the model by itself."""
    found = []
    for ids, trained in answers:
        every = log_softmax(model(ids[None]).logits[0, :-1], -1)
        each = every.gather(-1, ids[1:, None])[:, 0][trained[1:]]
        found.append((each.sum(), len(each)))
    sums, counts = zip(*found, strict=True)
    return torch.stack(sums), torch.tensor(counts)


def by_the_papers(name, policy, counts, reference, beta, gamma=1.0):
    """The loss of each pair."""
    (c, r), (nc, nr), (rc, rr) = (x.view(-1, 2).T for x in (policy, counts, reference))
    if name == "dpo":  # Rafailov et al. 2023, equation 7
        return -logsigmoid(beta * (c - rc) - beta * (r - rr))
    if name == "ipo":  # Azar et al. 2023, with means over tokens, as trl has it
        return ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2
    if name == "simpo":  # Meng et al. 2024
        return -logsigmoid(beta / nc * c - beta / nr * r - gamma)
    # Hong et al. 2024: odds(y) = P(y) / (1 - P(y)), with P the geometric mean over the tokens
    chosen, rejected = ((x / n).exp() for x, n in ((c, nc), (r, nr)))
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -c / nc - beta * torch.log(torch.sigmoid(torch.log(ratio)))


def opened(folder, path):
    return AutoModelForCausalLM.from_pretrained(folder / path, dtype=torch.float64).double()


BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
DDP = "strategy.name=ddp"
TP = "strategy.tp=2"
THEIRS = "model.implementation=transformers"


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["dpo", f"simpo {DDP}", "orpo", f"dpo {TP}"]),
        pytest.param(1, ["dpo", f"dpo {DDP}", "ipo", "simpo", "orpo"], marks=soak),
        pytest.param(2, [
            f"dpo {DDP}", "ipo", f"ipo {DDP}", "simpo", f"orpo {DDP}", "dpo strategy.zero=1",
            "dpo strategy.zero=2",
            f"orpo {TP} strategy.sequence_parallel=true", "dpo batch.micro_batch=3",
            f"dpo {EXACT}", "dpo strategy.activation_checkpointing=full",
        ], marks=soak),
        pytest.param(2, [
            f"dpo {THEIRS}", f"ipo {THEIRS} {DDP}", f"simpo {THEIRS}", f"orpo {THEIRS} {DDP}",
        ], marks=soak),
        pytest.param(3, ["dpo", f"ipo {DDP}", "simpo", "orpo strategy.zero=2"], marks=soak),
        pytest.param(4, [
            f"dpo {TP}", "simpo strategy.sharding=HYBRID_SHARD strategy.shard_size=2", "ipo",
            f"orpo {DDP}",
        ], marks=soak),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_the_papers(folder, start, tmp_path, ranks, layouts):
    """Means over all pairs, in double precision and each answer by itself, whatever shares what."""
    answers = list(answers_of(folder))
    with torch.no_grad():
        reference = log_probs(opened(folder, "before"), answers)[0].float()
    np.save(folder / "reference.npy", reference.numpy())
    stream = TokenStream.open(
        [(folder / "pairs-data", 1.0)], split="train", seq_len=128, seed=0, shuffle=False,
        documents="cu_seqlens",
    )  # fmt: skip
    fetched = [stream.fetch([n]) for n in range(stream.sequences)]
    assert len({len(one["answer_labels"]) for one in fetched}) > 1, "pairs are unevenly spread"
    common = f"model.init_from=second batch.global_batch={stream.sequences}"
    given = [
        f"{common} objective.name={name} objective.beta=null {' '.join(more)}".strip()
        for name, *more in (layout.split() for layout in layouts)
    ]
    program = ("tests.distributed.preference_gradients", str(tmp_path / "found"))
    code, output = start(ranks, *given, program=program, recipe="pairs.yaml").wait()
    assert code == 0, output
    found = load_file(tmp_path / "found-0.safetensors")
    model = opened(folder, "second")
    policy, counts = log_probs(model, answers)
    for number, layout in enumerate(layouts):
        name = layout.split()[0]
        loss = by_the_papers(name, policy, counts, reference.double(), BETA[name]).mean()
        model.zero_grad()
        loss.backward(retain_graph=True)
        ours = {key.removeprefix(f"{number}/"): one for key, one in found.items()}
        assert ours["means.loss"] == pytest.approx(loss.item(), rel=1e-6), layout
        pairs = [(ours[n].double(), p.grad) for n, p in model.named_parameters()]
        off = sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)
        print(f"{ranks} ranks, {layout}: gradients off by {off.sqrt():.1e}")
        assert off.sqrt() <= 1e-6, layout
        if name == "dpo":
            ahead = (policy - reference.double()).view(-1, 2) @ torch.tensor([1.0, -1.0]).double()
            assert ours["means.reward_margin"] == pytest.approx(0.1 * ahead.mean().item(), rel=1e-5)
            assert ours["means.reward_accuracy"] == pytest.approx(
                (ahead > 0).double().mean().item()
            )


@soak
def test_the_formulas_are_those_of_trl(folder, tmp_path):
    """DPO and IPO by its trainer on the same tokens; SimPO and ORPO by what its trainers make of
    log-probabilities, as they need tokens of their own."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset  # which trl needs
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    answers = list(answers_of(folder))
    shape = len(answers), max(len(ids) for ids, _ in answers)
    names = "input_ids", "attention_mask", "completion_mask"
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in names}
    for row, (ids, trained) in enumerate(
        answers[0::2] + answers[1::2]
    ):  # it wants all chosen first
        for name, values in zip(names, (ids, 1, trained.long()), strict=True):
            batch[name][row, : len(ids)] = values
    with torch.no_grad():
        policy, counts = log_probs(opened(folder, "second"), answers)
        reference, _ = log_probs(opened(folder, "before"), answers)
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="</s>", **VARIABLES)
    for name, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):
        options = trl.DPOConfig(
            output_dir=str(tmp_path), loss_type=[kind], beta=BETA[name], report_to=[], use_cpu=True,
            bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        models = opened(folder, "second"), opened(folder, "before")
        trainer = trl.DPOTrainer(*models, options, train_dataset=rows, processing_class=fast)
        theirs = trainer.compute_loss(trainer.model, batch).item()
        ours = by_the_papers(name, policy, counts, reference, BETA[name]).mean().item()
        print(f"{name}: trl {theirs:.9f}, by the paper {ours:.9f}")
        assert ours == pytest.approx(theirs, rel=1e-6), name
    chosen, rejected = (policy / counts).view(-1, 2).T
    given = {"alpha": 0.0, "label_smoothing": 0.0, "accelerator": trainer.accelerator}
    simpo = SimpleNamespace(loss_type="simpo", beta=BETA["simpo"], simpo_gamma=1.0, **given)
    orpo = SimpleNamespace(beta=BETA["orpo"], **given)
    for name, theirs in (
        ("simpo", CPOTrainer.cpo_loss(simpo, chosen, rejected)[0]),
        ("orpo", -chosen - ORPOTrainer.odds_ratio_loss(orpo, chosen, rejected)[0]),
    ):
        ours = by_the_papers(name, policy, counts, reference, BETA[name])
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-7)


def tensors_of(folder, run, step=6):
    files = (folder / run / f"checkpoints/step-{step:08}").rglob("*.safetensors")
    return {str(file.relative_to(folder / run)): file.read_bytes() for file in files}


def of_base(folder, split):
    with torch.no_grad():
        return log_probs(opened(folder, "before"), list(answers_of(folder, split)))[0].float()


@soak
@pytest.mark.parametrize("adapter", [ADAPTER, ""])
def test_a_run_that_is_killed_left_and_resumed_on_other_ranks_has_the_same_bits(
    folder, start, monkeypatch, adapter
):
    name = "adapted" if adapter else "whole"
    given = (EXACT, "run.evaluate_every=6", *filter(None, [adapter]))
    job = start(2, f"run.dir={name}-killed", *given, recipe="pairs.yaml")
    alone = start(1, f"run.dir={name}-alone", *given, recipe="pairs.yaml")
    wait_for_step(folder, f"{name}-killed", 3, job)
    job.kill()
    leaving = ("tests.distributed.ending", "SIGTERM", "1")  # told to go, in another world
    more = (f"run.dir={name}-killed", *given, "run.evaluate_every=1")
    code, output = start(1, *more, recipe="pairs.yaml", program=leaving).wait()
    assert code == 75, output
    code, output = alone.wait()
    assert code == 0, output
    assert "reference: computed in" in output
    kept = (folder / f"{name}-killed" / FILE).read_bytes()
    assert kept == (folder / f"{name}-alone" / FILE).read_bytes(), "at 2 ranks and at 1"
    found = load_file(folder / f"{name}-alone" / FILE)
    for split in ("train", "validation"):
        torch.testing.assert_close(found[split], of_base(folder, split), rtol=1e-5, atol=1e-5)
    code, output = start(3, f"run.dir={name}-killed", *given, recipe="pairs.yaml").wait()
    assert code == 0, output
    assert "log-probabilities are read from" in output
    assert "resuming after step" in output
    good, text = check(read_history(folder / f"{name}-killed"), folder / f"{name}-killed")
    assert good, text
    expected = tensors_of(folder, f"{name}-alone")
    assert len(expected) > 1
    assert tensors_of(folder, f"{name}-killed") == expected
    assert_audited(folder, f"{name}-killed", "--nproc", "3")
    replay = ("trainer.cli", "replay")
    job = start(1, "--step", "5", "--why", recipe=f"{name}-alone", program=replay)
    code, explained = job.wait()
    assert code == 0, explained
    assert "(all together 100.0%)" in explained
    (highest,) = re.findall(r"highest loss a pair:\n.*\n +([\d.]+) ", explained)
    logged = records(folder, f"{name}-alone")
    margins = [one["reward_margin"] for one in logged if "reward_margin" in one]
    assert abs(margins[0]) < 1e-4 < margins[-1]
    validated = next(one for one in logged if "validation_loss" in one)
    assert "validation_reward_accuracy" in validated
    # In the loop, too, losses are means over all pairs of a step, or of the validation set.
    monkeypatch.chdir(folder)
    stream = build_task(load_recipe("pairs.yaml")).stream
    fifth = np.concatenate(stream.documents_at(np.arange(4 * 6, 5 * 6)))
    for split, step, some, loss in (
        ("train", 4, fifth, next(one["loss"] for one in logged if one["step"] == 5)),
        ("validation", 6, slice(None), validated["validation_loss"]),
    ):
        answers = list(answers_of(folder, split))
        answers = [answers[n] for n in np.arange(len(answers))[some]]
        with torch.no_grad():
            model = opened(folder, f"{name}-alone/checkpoints/step-{step:08}")
            policy = log_probs(model, answers)
        of_pairs = by_the_papers("dpo", *policy, found[split][some].double(), 0.2)
        assert loss == pytest.approx(of_pairs.mean().item(), abs=1e-6), split
        if split == "train":
            assert float(highest) == pytest.approx(of_pairs.max().item(), abs=1e-3)
    assert logged[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)


@soak
@pytest.mark.timeout(900)
def test_nodes_that_are_lost_join_and_leave_change_no_bit(folder, start, tmp_path):
    """Of an adapter that pairs train: its weights, its state and the reference."""
    steps = 300
    given = (EXACT, ADAPTER, f"run.steps={steps}", "checkpoint.every=50", "batch.global_batch=2")
    quiet = start(1, "run.dir=quiet", *given, recipe="pairs.yaml")
    with LocalNodes(
        ["-m", "trainer", "pairs.yaml", "run.dir=nodes", *given], folder, "1:2", tmp_path,
        environment={"PYTHONPATH": str(ROOT)}, start=Forked,
    ) as nodes:  # fmt: skip

        def wait_for(ready):
            deadline = time.monotonic() + 180
            while not ready():
                assert time.monotonic() < deadline, [node.text()[-2000:] for node in nodes.nodes]
                time.sleep(0.02)

        def reached():
            return max(losses(folder, "nodes"), default=0)

        def trained_by(ranks):
            """Wait until so many ranks have trained some steps."""
            worlds = lambda: [one["world_size"] for one in starts(folder, "nodes")]  # noqa: E731
            wait_for(lambda: worlds()[-1:] == [ranks])
            met = reached()
            wait_for(lambda: reached() > met + 2)

        first, second = nodes.add(), nodes.add()
        trained_by(2)
        second.kill()
        trained_by(1)
        nodes.add()
        trained_by(2)
        first.process.send_signal(signal.SIGTERM)
        trained_by(1)
        assert nodes.wait(300) == [75, -signal.SIGKILL, 0]
    code, output = quiet.wait()
    assert code == 0, output
    good, text = check(read_history(folder / "nodes"), folder / "nodes")
    assert good, text
    assert tensors_of(folder, "nodes", steps) == tensors_of(folder, "quiet", steps)
    assert (folder / "nodes" / FILE).read_bytes() == (folder / "quiet" / FILE).read_bytes()


@soak
@pytest.mark.parametrize("adapter", [ADAPTER, ""])
def test_a_reference_of_other_things_is_computed_anew(folder, start, adapter):
    name = "anew-adapted" if adapter else "anew"
    given = (f"run.dir={name}", EXACT, *filter(None, [adapter]))

    def train(ranks, steps):
        job = start(ranks, *given, f"run.steps={steps}", recipe="pairs.yaml")
        code, output = job.wait()
        assert code == 0, output
        return output

    train(1, 2)
    path = folder / name / FILE
    kept = path.read_bytes()
    for number, (change, why) in enumerate(
        [
            (None, ""),
            (kept[:-1], "is damaged"),
            (kept[:3], "cannot be read"),
            (kept.replace(b'"dtype": "fp32', b'"dtype": "bf16'), "is of another dtype"),
        ]
    ):
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change)
        output = train(2 - number % 2, 4 + number)  # from a checkpoint of trained weights
        assert "reference: computed in" in output
        assert "resuming after step" in output
        assert why in output
        assert path.read_bytes() == kept, "of the first weights, not of those that were trained"
    # Another base: a run of its own, with the file of this one.
    other = folder / f"{name}-other"
    other.mkdir()
    (other / FILE).write_bytes(kept)
    more = (f"run.dir={other.name}", "model.init_from=second", "run.steps=1")
    code, output = start(1, *given, *more, recipe="pairs.yaml").wait()
    assert code == 0, output
    assert "is of another base, so the reference is computed anew" in output
    assert load_file(other / FILE)["train"][0] != load_file(path)["train"][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.name=sft", "objective.beta=null"], "holds pairs of answers, which sft does"),
        (["objective.name=sft"], "objective.beta: only for dpo, ipo, simpo and orpo; remove it"),
        (["objective.gamma=1"], "objective.gamma: only for objective.name: simpo, but it is dpo"),
        (["data.sources=[{path: data}]"], "dpo compares pairs of answers, but .* holds documents"),
        (["data.pack=stream"], "data.pack: objective.name=dpo needs whole pairs"),
        (["data.document_mask=false"], "data.document_mask: objective.name=dpo needs answers"),
        (["strategy.pp=2"], "strategy.pp: objective.name=dpo does not work with a pipeline yet"),
        (["strategy.cp=2"], "strategy.cp: objective.name=dpo does not cut sequences yet"),
        (["model.factory=a:b", "model.init_from=null"], "model.factory: objective.name=dpo finds"),
        (["objective.beta=0"], "objective.beta"),
    ],
)
def test_what_does_not_go_with_pairs_is_one_clear_line(folder, monkeypatch, overrides, message):
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError, match=message):
        build_task(load_recipe("pairs.yaml", overrides))
