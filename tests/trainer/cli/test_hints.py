"""Commands that messages, helps and recipes show: each is one that the parser takes."""

import argparse
import ast
import re
import shlex
from functools import cache

import pytest

from tests import prose
from tests.distributed.jobs import RECIPE, ROOT
from trainer.cli.main import _parser, parse
from trainer.recipe import RecipeError, load_recipe
from trainer.tasks.task import open_streams

PACKAGES = ("trainer", "elastic", "checkpointing", "lab")
VALUE = "quickstart"
"""In place of what a message fills in: names of files and recipes."""
WHOLE = r"perdure .*(?:(?<=\\)\n.*)*"
"""A command at the end of a line, with the lines that go on with it."""
IN_TEXT = re.compile(
    rf"^  ({WHOLE})$|`(perdure [^`]*)`|(?:then: |of this name: )(perdure .*)$", re.M
)
IN_RECIPE = re.compile(rf"^#? +({WHOLE})$|# (perdure data prepare .*)$", re.M)


def literals(path):
    """Strings of a module, without docstrings; what is filled in, is VALUE."""
    text = path.read_text(encoding="utf-8")
    if "perdure " not in text or "EXAMPLES.format" in text:  # its commands are in `helps`
        return
    parts = set()
    for node in ast.walk(ast.parse(text)):  # outer ones come first
        match node:
            case ast.Expr(ast.Constant(str())):
                parts.add(id(node.value))
            case ast.JoinedStr(values):
                parts |= {id(one) for one in values}
                yield "".join(
                    one.value if isinstance(one, ast.Constant) else VALUE for one in values
                )
            case ast.Constant(str(value)) if id(node) not in parts:
                yield value


def helps(parser):
    """What each command says after `--help`, at its end."""
    yield parser.epilog or ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from helps(command)


def shown():
    """Commands of messages, examples of helps, and comments of recipes."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = [*helps(_parser()), *(text for path in modules for text in literals(path))]
    found = [one for text in texts for one in IN_TEXT.findall(text)]
    for path in (ROOT / "recipes").glob("*.yaml"):
        found += IN_RECIPE.findall(path.read_text(encoding="utf-8"))
    for groups in found:
        lines = re.sub(r"^#", "", "".join(groups), flags=re.M).splitlines()
        for command in prose.commands(lines):
            yield re.split(r" {3,}| > ", command)[0]


def accepted(command):
    """Whether the parser takes it."""
    try:
        parse(shlex.split(command)[1:])
    except SystemExit as end:
        return end.code == 0
    return True


def test_every_command_that_is_shown_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setattr("trainer.cli.main._parser", cache(_parser))
    commands = set(shown())
    assert len(commands) > 45
    for kind in ("train", "data prepare", "recipe copy", "import-deepspeed"):
        assert any(command.startswith(f"perdure {kind} ") for command in commands), kind
    # A name alone is no hint: `perdure compare`.
    alone = re.compile(r"perdure [a-z-]+( (prepare|inspect|copy|export))?")
    wrong = [one for one in commands if not (alone.fullmatch(one) or accepted(one))]
    assert wrong == [], capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data prepare x --uot y", "--out"),
        ("train x.yaml --nproc_per_node 2", "--nproc-per-node"),
        ("plan x.yaml -gpus=8xH100", "--gpus"),
        ("--versoin", "--version"),
        ("generate run --prompt '- so' --top-q=3", "--top-k"),
    ],
)
def test_a_mistyped_option_is_answered_by_the_one_that_was_meant(capsys, typed, meant):
    assert not accepted(f"perdure {typed}")
    assert capsys.readouterr().err.endswith(f"; did you mean '{meant}'?\n")


def test_what_looks_like_an_option_may_be_a_value():
    taken = parse(["generate", "run", "--prompt", "-- he said", "--temp", "0", "--seed=-1"])
    assert (taken.prompt, taken.temperature, taken.seed) == ("-- he said", 0, -1)


@pytest.mark.parametrize(
    ("overrides", "command"),
    [
        (
            ["data.sources.0.path=data/wikipedia", "model.architecture.vocab_size=4096"],
            "perdure data prepare wikipedia --out data/wikipedia --train-bpe 4096",
        ),
        (
            ["data.sources.0.path=my data", "model.architecture.vocab_size=151936"],
            "perdure data prepare INPUT --out 'my data' --tokenizer tokenizer.json",
        ),
        (
            ["data.sources.0.path=d", "model.architecture=null", "model.init_from=Qwen3-0.6B"],
            "perdure data prepare INPUT --out d --tokenizer Qwen3-0.6B",
        ),
    ],
)
def test_who_has_no_data_is_told_the_command_that_makes_it(
    tmp_path, monkeypatch, overrides, command
):
    monkeypatch.chdir(tmp_path)  # not where data may lie
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(RecipeError) as told:
        open_streams(load_recipe(recipe, overrides))
    assert str(told.value).endswith(f"make one with `{command}`")
    assert accepted(command)
