"""A real chat model and real chats, from packages of a registry: an adapter is the same whatever
happens to its run, and others open it, merge it and train on from it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastic.record.history import read_history
from lab.local_nodes import LocalNode, LocalNodes, start_python
from tests.distributed.jobs import ROOT, losses, soak, starts
from tests.late import Late
from trainer.cli.main import parse
from trainer.data.shards import TokenDataset
from trainer.tools.report.report import check

peft = Late("peft")
pytestmark = [soak, pytest.mark.timeout(3600)]
RECIPE = "smollm2_sft.yaml"
CHATS, STEPS = 50, 12
EXACT = (
    "run.determinism=exact", "run.epochs=0", "run.log_every=1", "run.evaluate_every=0",
    "data.seq_len=96", "batch.global_batch=3", "batch.micro_batch=1", "checkpoint.keep_best=0",
    "schedule.name=constant",
)  # fmt: skip
SHORT = (*EXACT, f"run.steps={STEPS}", "checkpoint.every=4")
QUESTIONS = ("What is a computer?", "Hello", "What is the capital of France?")
KILLED_FOR, KILL_EVERY = 600, 20
LONG_STEPS = int(os.environ.get("KILLED_STEPS", "240"))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with models/smollm2, 50 chats as data/smalltalk, and the recipe."""
    folder = tmp_path_factory.mktemp("smollm2")
    for name in ("models/smollm2", "data/smalltalk.jsonl"):
        if (ROOT / name).exists():  # `make finetune` has brought it
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, ROOT / "examples/smollm2.py"], cwd=folder, check=True)
    lines = (folder / "data/smalltalk.jsonl").read_text().splitlines(keepends=True)
    step = len(lines) // CHATS
    (folder / "chats.jsonl").write_text("".join(lines[: CHATS * step : step]))
    shutil.copy(ROOT / "recipes" / RECIPE, folder)
    perdure(
        folder, "data", "prepare", "chats.jsonl", "--chat", "--tokenizer", "models/smollm2",
        "--out", "data/smalltalk",
    )  # fmt: skip
    return folder


def perdure(folder, *words):
    """A command, in this process."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        arguments = parse(tuple(map(str, words)))
        assert arguments.run(arguments) == 0
    finally:
        os.chdir(before)


def start(folder, ranks, *overrides):
    """`perdure train` on so many ranks; ends with this process."""
    command = ["trainer.cli", "train", RECIPE, *overrides, "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return start_python(command, folder, environment, folder / "log.txt")


def train(folder, ranks, *overrides):
    """To the end, which must be good."""
    assert start(folder, ranks, *overrides).wait() == 0, (folder / "log.txt").read_text()[-3000:]


def wait_for(ready):
    deadline = time.monotonic() + 600
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reached(folder, run):
    """The highest step that is logged."""
    return max(losses(folder, run), default=0)


@pytest.fixture(scope="module")
def undisturbed(home):
    """The last step of a run of one rank that nothing happens to."""
    train(home, 1, "run.dir=alone", *SHORT)
    return home / "alone" / "checkpoints" / f"step-{STEPS:08}"


def test_the_adapter_is_that_of_an_undisturbed_run(home, undisturbed):
    """A node of two is lost, then a rank is killed, then all; three ranks go on."""
    given = ("run.dir=lost", *SHORT)
    with LocalNodes(
        ["-m", "trainer", RECIPE, *given], home, "1:2", home,
        environment={"PYTHONPATH": str(ROOT)}, own_memory=os.geteuid() == 0,
    ) as nodes:  # fmt: skip
        first, second = nodes.add(), nodes.add()
        wait_for(lambda: [one for one in starts(home, "lost") if one["world_size"] == 2])
        met = reached(home, "lost")
        wait_for(lambda: reached(home, "lost") > met)
        second.kill()
        met = reached(home, "lost")
        wait_for(lambda: reached(home, "lost") > met)
        os.kill(first.trainers()[0], signal.SIGKILL)
        met = reached(home, "lost")
        wait_for(lambda: reached(home, "lost") > met)
        first.kill()
    assert reached(home, "lost") < STEPS
    train(home, 3, *given)
    history = read_history(home / "lost")
    assert len({attempt.start.world_size for attempt in history.attempts}) == 3
    good, text = check(history, home / "lost")
    assert good, text
    step = home / "lost" / "checkpoints" / undisturbed.name
    for file in ("adapter_model.safetensors", "optimizer/optimizer-00001-of-00001.safetensors"):
        assert (step / file).read_bytes() == (undisturbed / file).read_bytes(), file
    published = home / "models/smollm2"
    beside = {path.name for path in published.iterdir()} - {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= beside
    for name in beside:
        assert (step / name).read_bytes() == (published / name).read_bytes(), name


def test_trained_tokens_are_those_of_trl(home, tmp_path):
    """Of the last answer of each chat, for which trl follows the law."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset  # which trl needs

    perdure(
        home, "data", "prepare", "chats.jsonl", "--chat", "--turns", "last", "--tokenizer",
        "models/smollm2", "--validation-fraction", 0, "--out", "data/last",
    )  # fmt: skip
    ours = TokenDataset(home / "data/last", "train")
    chats = [json.loads(line)["messages"] for line in (home / "chats.jsonl").open()]
    published = home / "models/smollm2"
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(published),
        args=trl.SFTConfig(
            output_dir=str(tmp_path), completion_only_loss=True, max_length=None, report_to=[],
            use_cpu=True, bf16=False, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": one[:-1], "completion": one[-1:]} for one in chats]
        ),
        processing_class=AutoTokenizer.from_pretrained(published),
    )  # fmt: skip
    theirs = trainer.train_dataset
    start = trained = 0
    assert len(ours.lengths()) == len(theirs) == CHATS
    for length, row in zip(ours.lengths().tolist(), theirs, strict=True):
        assert ours.read(start, length).tolist() == row["input_ids"]
        wanted = [label != -100 for label in row["labels"]]
        assert ours.read_trained(start, length).tolist() == wanted
        start, trained = start + length, trained + sum(wanted)
    print(f"{trained:,} of {start:,} tokens are trained, by both")
    assert 0 < trained < start


def test_others_open_it_merge_it_and_train_on(home, undisturbed, tmp_path):
    """PEFT, transformers and trl; answers end by themselves, as those of the model do."""
    published = home / "models/smollm2"
    tokenizer = AutoTokenizer.from_pretrained(published)

    def plain(place):
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )
        for question in QUESTIONS
    ]  # fmt: skip
    perdure(home, "ckpt", "export", undisturbed, tmp_path / "merged", "--merge", "--dtype", "fp32")
    adapted = peft.PeftModel.from_pretrained(plain(published), undisturbed)
    merged = plain(tmp_path / "merged")
    with torch.no_grad():
        for prompt in prompts:
            expected, before = adapted(**prompt).logits, plain(published)(**prompt).logits
            assert (expected - before).abs().max() > 0.1, "the adapter has learned something"
            off = (merged(**prompt).logits - expected).abs().max().item()
            print(f"merged logits off by {off:.1e}")
            assert off <= 1e-5 * expected.abs().max().item()
    for model in (plain(published), merged):
        for prompt in prompts:
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=256)[0]
            assert tokenizer.decode(ids[-1:]) == "<|im_end|>", tokenizer.decode(ids)

    trl = pytest.importorskip("trl")
    from datasets import load_dataset  # which trl needs

    rows = load_dataset("json", data_files=str(home / "chats.jsonl"), split="train")
    options = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=2, per_device_train_batch_size=4,
        learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    model = peft.PeftModel.from_pretrained(plain(published), undisturbed, is_trainable=True)
    trainer = trl.SFTTrainer(model, args=options, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    model.save_pretrained(tmp_path / "on")
    theirs, ours = (
        load_file(place / "adapter_model.safetensors") for place in (tmp_path / "on", undisturbed)
    )
    assert theirs.keys() == ours.keys()
    assert any(not theirs[name].equal(ours[name]) for name in ours)
    base = ("--base", published)
    perdure(home, "ckpt", "export", tmp_path / "on", tmp_path / "on-merged", "--merge", *base)


def test_killed_every_20_seconds_for_ten_minutes_it_ends_with_the_same_weights(home):
    """By turns a rank is killed, and all of the job, which starts again on other ranks."""
    given = (*EXACT, f"run.steps={LONG_STEPS}", "checkpoint.every=20")
    train(home, 1, "run.dir=quiet", *given)
    began, kills, worlds = time.monotonic(), 0, (2, 1, 3)
    job = start(home, worlds[0], "run.dir=hunted", *given)
    while time.monotonic() - began < KILLED_FOR:
        time.sleep(KILL_EVERY)
        assert job.poll() is None, "it has ended before its time; KILLED_STEPS=480 makes it longer"
        node = LocalNode(0, job, home / "log.txt")
        kills += 1
        ranks = node.trainers()
        if kills % 3 and ranks:
            os.kill(ranks[kills % len(ranks)], signal.SIGKILL)
        else:
            node.kill()
            job = start(home, worlds[kills // 3 % len(worlds)], "run.dir=hunted", *given)
    assert job.wait() == 0, (home / "log.txt").read_text()[-3000:]
    history = read_history(home / "hunted")
    good, text = check(history, home / "hunted")
    assert good, text
    print(f"{kills} kills, {len(history.attempts)} attempts; {text}")
    quiet, hunted = (
        next((home / run / "checkpoints").glob(f"*{history.step}/adapter_model.safetensors"))
        for run in ("quiet", "hunted")
    )
    assert quiet.read_bytes() == hunted.read_bytes()
    state = json.loads((hunted.parent / "trainer_state.json").read_text())
    assert state["step"] == history.step
