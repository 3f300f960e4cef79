"""A table of stages: what it says of each data set, and what is wrong with others."""

import json

import pytest

from trainer.recipe import RecipeError, dump_recipe
from trainer.recipe.data_change import RecipeDataChange, parsed, plain, with_changes
from trainer.recipe.sections import DataStageSection, SourceSection
from trainer.recipe.stages import RecipeStageRow, ordered, table
from trainer.recipe.yaml_tree import read_tree

SOURCES = "data.sources=[{path: d/new}, {path: d/c/}, {path: b}, {name: a, path: s3://x/y}]"


def staged(*stages):
    return SOURCES, f"data.stages={json.dumps(stages)}"


FIRST = {"until": 30, "weights": {"a": 0.7, "b": 0.3}}
SECOND = {"until": 50, "append": {"b": ["new"]}}
LAST = {"weights": {"c": 2, "a": 1}}


def test_data_sets_are_numbered_as_stages_name_them(recipe, tmp_path):
    """So a table that grows keeps their numbers."""
    found = recipe(*staged(FIRST, SECOND, LAST))
    assert [source.called for source in ordered(found.data)] == ["b", "a", "new", "c"]
    assert table(found.data) == [
        RecipeStageRow(0, {1: 0.7, 0: 0.3}, {0: 0, 1: 1}),
        RecipeStageRow(30, {1: 0.7, 0: 0.3}, {2: 0}),
        RecipeStageRow(50, {3: 2.0, 1: 1.0}, {3: 3}),
    ]
    (tmp_path / "again.yaml").write_text(dump_recipe(found))
    assert read_tree(tmp_path / "again.yaml")[0]["data"]["stages"][1]["append"] == {"b": ["new"]}
    assert (table(recipe().data), ordered(recipe().data)) == ([], recipe().data.sources)


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ([FIRST, LAST, LAST], "data.stages.1.until: is required; give the number of sequences"),
        ([FIRST, SECOND], "data.stages.1.until: the last stage lasts to the end"),
        ([FIRST, FIRST, LAST], "data.stages.1.until: 30 is not after 30, where the stage begins"),
        ([{**FIRST, "until": 2**60}, LAST], "data.stages.0.until: must be at most 9.0072e+15"),
        ([{"until": 0}, LAST], "data.stages.0.until: must be at least 1"),
        ([SECOND, LAST], "data.stages.0.weights: is required"),
        ([{**SECOND, **FIRST}, LAST], "data.stages.0.append: nothing precedes the first stage"),
        ([FIRST, {"weights": {}}], "data.stages.1.weights: is empty; name"),
        ([FIRST, {"weights": {"bb": 1}}], "no source 'bb'; did you mean 'b'"),
        ([FIRST, {"weights": {"b": -1}}], "data.stages.1.weights.b: must be above 0"),
        ([FIRST, {"append": {"c": ["new"]}}], "there is no source 'c'"),
        ([FIRST, {"append": {"b": ["nw"]}}], "there is no source 'nw'; did you mean 'new'"),
        ([FIRST, {"append": {"b": ["a"]}}], "'a' is also a source with a weight; remove one"),
        ([FIRST, SECOND, {**SECOND, **LAST, "until": None}], "'new' is appended twice"),
        ([FIRST, LAST], "data.sources.0: no stage names 'new'; name it in one, or remove it"),
        ([FIRST, SECOND, LAST, "data.sources.0.name=a"], "sources.3.name: 'a' is also the name"),
        ([FIRST, SECOND, LAST, "data.sources.1.weight=2"], "sources.1.weight: with data.stages"),
        ([FIRST, SECOND, LAST, "run={dir: r, epochs: 2}"], "give run.steps instead of run.epochs"),
    ],
)
def test_a_wrong_table_is_named_by_its_key(recipe, stages, what):
    rows = [one for one in stages if not isinstance(one, str)]
    with pytest.raises(RecipeError) as error:
        recipe(*staged(*rows), *[one for one in stages if isinstance(one, str)])
    assert what in str(error.value)


def test_a_change_is_a_stage_from_where_it_begins(recipe):
    """Before a later stage, inside one, and at a border; a second time it changes nothing."""
    one, shares = recipe("data.sources=[{path: b, weight: 2}, {path: a}]"), {"b": 2.0, "a": 1.0}
    first = RecipeDataChange(
        name="1", begin=30, weights={"c": 1.0}, sources=(SourceSection(path="/d/c"),)
    )
    second = RecipeDataChange(
        name="2", begin=20, append={"a": ("new",)}, sources=(SourceSection(path="new"),)
    )
    found = with_changes(one, [first, second], "changes")
    assert [source.path for source in found.data.sources] == ["b", "a", "/d/c", "new"]
    assert found.data.stages == (
        DataStageSection(until=20, weights=shares),
        DataStageSection(until=30, append={"a": ("new",)}),
        DataStageSection(weights={"c": 1.0}),
    )
    assert table(found.data)[0] == RecipeStageRow(0, {0: 2.0, 1: 1.0}, {0: 0, 1: 1})
    assert with_changes(found, [first, second], "changes") == found
    third = RecipeDataChange(name="3", begin=30, weights={"a": 4.0, "c": 1.0})
    changed = with_changes(found, [first, second, third], "changes")
    assert changed.data.stages[2] == DataStageSection(weights={"a": 4.0, "c": 1.0})
    assert with_changes(changed, [first, second, third], "changes") == changed
    fourth = RecipeDataChange(
        name="4", begin=20, append={"a": ("d",)}, sources=(SourceSection(path="d"),)
    )
    grown = with_changes(found, [first, second, fourth], "changes")
    assert grown.data.stages[1] == DataStageSection(until=30, append={"a": ("new", "d")})
    with pytest.raises(RecipeError, match=r"data\.stages\.1\.weights: there is no source 'd'"):
        with_changes(one, [RecipeDataChange(name="5", begin=9, weights={"d": 1.0})], "changes")
    assert parsed(plain([first, second])) == [first, second]
    for wrong in ([{"name": "6"}], [{**plain([first])[0], "begin": 0}], {}, [1]):
        with pytest.raises(ValueError, match="not a valid change of the data"):
            parsed(wrong)
