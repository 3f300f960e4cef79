"""Tasks of lm-evaluation-harness: what it finds of a committed step is what it finds of the same
model with transformers."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.support import json_lines
from checkpointing.tools.convert import import_checkpoint
from tests.distributed.jobs import ROOT, soak
from trainer.cli.main import parse
from trainer.data.tokenizer import byte_tokenizer
from trainer.tools.generate import GenerateError, open_model

TASKS = ("--tasks", "capitals", "--include-path", "examples/tasks")


def perdure(*words):
    arguments = parse(words)
    assert arguments.run(arguments) == 0


@pytest.fixture
def step(tmp_path, monkeypatch):
    """A committed step of a run, of a random Qwen3 that takes 96 bytes, beside examples/tasks."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=96,
        eos_token_id=256, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained("model")
    byte_tokenizer().save("tokenizer.json")
    PreTrainedTokenizerFast(
        tokenizer_file="tokenizer.json", eos_token="<|endoftext|>"
    ).save_pretrained("model")
    shutil.copytree(ROOT / "examples/tasks", "examples/tasks")
    path = Path("run/checkpoints/step-00000004")
    import_checkpoint("model", path, step=4)
    return path


@soak
def test_answers_are_those_of_transformers(step):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from trainer.tools.harness import _HarnessModel

    theirs = HFLM(pretrained=str(step), device="cpu", dtype="float32", batch_size=3)
    ours = _HarnessModel(open_model(step))

    def asked(*given):
        return [
            Instance(request_type="loglikelihood", doc={}, arguments=one, idx=number)
            for number, one in enumerate(given)
        ]

    pairs = [("The river", " is long"), ("The river ", "is"), ("", "Rome"), ("x" * 150, " y")]
    for mine, other in zip(
        ours.loglikelihood(asked(*pairs)), theirs.loglikelihood(asked(*pairs)), strict=True
    ):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    texts = [("Rome",), (" ".join(map(str, range(100))),)]  # the harness mixes up equal windows
    assert ours.loglikelihood_rolling(asked(*texts)) == pytest.approx(
        theirs.loglikelihood_rolling(asked(*texts)), rel=1e-5
    )
    (likely,) = theirs.generate_until(asked(("The", {"until": [], "max_gen_toks": 12})))
    stop = likely[5]
    for options in ({"until": []}, {"until": [stop]}, {"until": stop, "do_sample": False}):
        request = asked(("The", {**options, "max_gen_toks": 12}), ("A", {"max_gen_toks": 3}))
        assert ours.generate_until(request) == theirs.generate_until(request)


@soak
def test_a_task_of_ones_own_without_a_network(step, capsys):
    perdure("eval", "run", *TASKS)
    assert "step 4: 1 task(s), in run/tasks.jsonl" in capsys.readouterr().out
    (line,) = json_lines(Path("run/tasks.jsonl"))
    assert (line["step"], line["task"], line["limit"]) == (4, "capitals", None)
    values = line["results"]["capitals"]
    assert 0 <= values["acc,none"] <= 1
    assert {"acc,none", "acc_norm,none"} <= values.keys()
    perdure("eval", "run", *TASKS)
    assert "nothing new: run/tasks.jsonl is unchanged" in capsys.readouterr().out
    perdure("eval", "run", *TASKS, "--limit", "3")
    assert len(json_lines(Path("run/tasks.jsonl"))) == 2
    with pytest.raises(GenerateError, match="knows no capital; `lm-eval ls tasks` lists"):
        perdure("eval", "run", "--tasks", "capital", "--include-path", "examples/tasks")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "capitals", "--top-k", "3"), "--top-k: tasks set their own sampling"),
        (("--tasks", ","), "--tasks: lists no task"),
        (("--prompts", "p.txt", "--limit", "3"), "--limit: works only with --tasks"),
        (("--prompts", "p.txt", "--include-path", "."), "--include-path: works only with --tasks"),
    ],
)
def test_options_that_do_not_belong(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("The river\n")
    with pytest.raises(GenerateError, match=said):
        perdure("eval", "run", *words)
