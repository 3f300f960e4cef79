"""Recipes that are made to cost time or memory, or to raise anything, end in one line."""

import time
from itertools import pairwise

import pytest

from trainer.recipe import RecipeError
from trainer.recipe.yaml_tree import read_tree

ALIASES = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))
HOSTILE = {
    "a mapping in itself": ("run: &a {dir: *a}", "nested more than 64 deep"),
    "a list in itself": ("run: &a [*a]", "nested more than 64 deep"),
    "brackets": ("[" * 20_000, "nested more than 64 deep"),
    "closed brackets": ("run: " + "[" * 20_000 + "]" * 20_000, "nested more than 64 deep"),
    "dashes": ("- " * 20_000, "nested more than 64 deep"),
    "aliases": (f"a: &a [1]\n{ALIASES}", "more than 5,000 values"),
    "values": ("a: [" + "1," * 20_000 + "]", "more than 5,000 values"),
    "digits": ("run: {steps: " + "9" * 5000 + "}", "it has 5,000 characters"),
    "hexadecimal digits": ("run: {steps: 0x" + "f" * 5000 + "}", "it has 5,002 characters"),
    "a day": ("run: {dir: 2024-02-30}", "day is out of range"),
    "an hour": ("run: {dir: 2024-01-01T25:00:00Z}", "hour must be in"),
    "a tagged word": ("run: {steps: !!int x}", "is no value"),
    "a tagged time": ("run: {dir: !!timestamp x}", "is no value"),
    "a list for a key": ("? &a [*a]\n: 1", "a key must be a word"),
    "a NUL": ("run: \0", "not valid YAML"),
    "a tab": ("run:\n\tdir: x", "2: not valid YAML: a tab cannot indent a line; write spaces"),
    "two documents": ("a: 1\n---\nb: 1", "2: not valid YAML: a second document begins here"),
    "a shifted line": ("run:\n  a: 1\n b: 1", "3: not valid YAML: the indentation does not fit"),
    "size": ("#" * 300_000, "larger than 256 KiB"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_recipe_ends_in_one_line_at_once(tmp_path, what):
    text, why = HOSTILE[what]
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    began = time.monotonic()
    with pytest.raises(RecipeError, match=why) as error:
        read_tree(file)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400
    assert time.monotonic() - began < 10  # 1 s on a machine with nothing else to do


@pytest.mark.parametrize(
    "override", ["a=" + "[" * 5000, "a=" + "9" * 5000, "a=&b [*b]", "a." * 99 + "b=1"]
)
def test_so_does_a_hostile_override(tmp_path, override):
    file = tmp_path / "recipe.yaml"
    file.write_text("run: {dir: x}")
    _, _, (problem,) = read_tree(file, [override])
    assert "\n" not in problem.what


def test_neither_a_device_nor_a_folder_is_a_recipe(tmp_path):
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(RecipeError, match="cannot read the recipe"):
            read_tree(path)
