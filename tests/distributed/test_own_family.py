"""examples/own_family.py as a user has it: in from Hugging Face, train, out to Hugging Face."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import ArceeConfig, ArceeForCausalLM, AutoModelForCausalLM

from tests.distributed.jobs import ROOT, losses
from trainer.data.loader import TokenStream
from trainer.models.family import find_family
from trainer.recipe import RecipeError, load_recipe
from trainer.tasks.task import build_task
from trainer.tools.generate import empty_model, generate, load_weights

SIZES = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OURS = ("model.architecture=null", "model.family=own_family:ARCEE", "model.init_from=arcee")
FRESH = (
    "model.family=own_family:ARCEE",
    "model.architecture.model_type=arcee",
    "model.architecture.head_dim=12",
)


@pytest.fixture(scope="session")
def published(workspace):
    """With norms away from one and wide weights, so that another activation shows."""
    shutil.copy(ROOT / "examples/own_family.py", workspace)
    torch.manual_seed(3)
    model = ArceeForCausalLM(ArceeConfig(**SIZES, initializer_range=0.2, rope_theta=5e5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    model.save_pretrained(workspace / "arcee")
    return model.eval()


@pytest.fixture(autouse=True)
def there(workspace, published, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(workspace)


@torch.no_grad()
def test_logits_are_those_of_transformers(workspace, published):
    family, folder = find_family("own_family:ARCEE"), workspace / "arcee"
    decoder = empty_model(folder, family)
    load_weights(decoder, folder, torch.device("cpu"))
    tokens = torch.randint(0, 257, (2, 100), generator=torch.Generator().manual_seed(1))
    expected = published(tokens).logits
    assert expected.std() > 0.5
    # float32 rounding through two layers
    torch.testing.assert_close(decoder(tokens), expected, atol=1e-5, rtol=0, check_stride=False)


def test_there_and_back(workspace, train, published):
    output = train(
        2, "run.dir=afm", "run.steps=3", "schedule={}", "data.document_mask=false", *OURS
    )
    assert "arcee decoder" in output
    stream = TokenStream.open(
        [(workspace / "data", 1.0)], split="train", seq_len=32, seed=7, shuffle=True
    )
    batch = stream.fetch(range(8))
    with torch.no_grad():
        logits = published(batch["input_ids"]).logits
    expected = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    assert losses(workspace, "afm")[1] == pytest.approx(expected, rel=1e-5)

    checkpoint = workspace / "afm/checkpoints/step-00000003"
    trained, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(trained, ArceeForCausalLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    prompt = "to be"
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    expected_ids = trained.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    options = {"max_new_tokens": 8, "temperature": 0, "family": "own_family:ARCEE"}
    text = "".join(generate(checkpoint, prompt, **options))
    assert prompt + text == tokenizer.decode(expected_ids[0].tolist())


RULED = """
from dataclasses import replace
from own_family import ARCEE
from trainer import ParameterGroup

RULES = [
    ParameterGroup(match="*.mlp.*", weight_decay=0.7),
    ParameterGroup(match="*layernorm*", weight_decay=0.5, lr_scale=0.1),
    ParameterGroup(match="lm_head.weight", weight_decay=9.0),  # this model has none: it is tied
]
ARCEE = replace(ARCEE, groups=RULES)
"""


def test_fresh_weights_and_rules_of_the_family_behind_those_of_the_recipe(workspace, train):
    (workspace / "ruled_family.py").write_text(RULED)
    rule = "optimizer.groups=[{match: '*.mlp.up_proj.*', weight_decay: 0.3}]"
    overrides = ["run.steps=2", "schedule={}", *FRESH, "model.family=ruled_family:ARCEE", rule]
    train(1, "run.dir=fresh", *overrides)
    checkpoint = workspace / "fresh/checkpoints/step-00000002"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    block, rate = "model.layers.0.", state["parameter_groups"]["model.embed_tokens.weight"]["lr"]
    for name, decay, scale in (
        ("mlp.up_proj.weight", 0.3, 1),  # the recipe's comes first
        ("mlp.down_proj.weight", 0.7, 1),
        ("post_attention_layernorm.weight", 0.5, 0.1),
        ("self_attn.q_proj.weight", 0.1, 1),  # as without any rule
    ):
        expected = {"lr": pytest.approx(scale * rate), "weight_decay": decay}
        assert state["parameter_groups"][block + name] == expected, name
    _, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["model.family=own_family:SquaredReLU"],
            "own_family:SquaredReLU is a type, not a trainer.Family",
        ),
        (
            ["model.family=own_family:NONE"],
            "own_family.py has no NONE; it has TENSOR_PLAN, SquaredReLU, block, ARCEE",
        ),
        (["model.architecture.model_type=qwen3"], "but model.family=own_family:ARCEE has arcee"),
        (
            ["model.family=loose_rules:ARCEE"],
            "{'match': '*'} is no trainer.ParameterGroup(match=…",
        ),
        (["model.architecture.options={depth: 3}"], "arcee has no depth; known: none"),
    ],
)
def test_what_is_no_family_is_told_in_a_line(workspace, change, message):
    (workspace / "loose_rules.py").write_text(
        RULED.replace("groups=RULES", "groups=[{'match': '*'}]")
    )
    with pytest.raises(RecipeError) as refusal:
        build_task(load_recipe("recipe.yaml", [*FRESH, *change]))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
