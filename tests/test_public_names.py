"""What a package says is public: `__all__`. Readers are shown that, and type checkers see it."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from docs import api

ROOT = Path(__file__).parents[1]
SHOWN = [
    *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))),
    *(
        block
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    ),
]
"""Python that readers copy."""


def imports(tree):
    """(module, name) of each `from module import name` below a node."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(str(node.module), alias.name) for node in found for alias in node.names}


@pytest.mark.parametrize("package", api.PACKAGES)
def test_all_is_what_is_public(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        home = f"{package}.{module._HOME[name]}"
        if callable(value):
            assert value.__module__.startswith(home), f"{name} is at home elsewhere"
    here = {  # of this package, and no module
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
        if getattr(value, "__module__", "").startswith(package)
    }
    assert here <= set(module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("package", api.PACKAGES)
def test_type_checkers_see_all_public_names(package):
    """Where they are at run time, too."""
    module = importlib.import_module(package)
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    wanted = {(f"{package}.{home}", name) for name, home in module._HOME.items()}
    assert imports(block) == wanted
    assert (Path(inspect.getfile(module)).parent / "py.typed").exists()


@pytest.mark.parametrize(
    "package", ["trainer.data", "trainer.models", "trainer.plan", "trainer.recipe"]
)
def test_all_of_a_room_is_what_it_imports(package):
    module = importlib.import_module(package)
    assert {name for _, name in imports(ast.parse(inspect.getsource(module)))} == set(
        module.__all__
    )


def test_readers_are_shown_public_names_only():
    shown = {pair for block in SHOWN for pair in imports(ast.parse(block))}
    ours = {pair for pair in shown if pair[0].partition(".")[0] in api.PACKAGES}
    assert len(ours) > 10
    adapters = {("checkpointing.adapters", one.rpartition(".")[2]) for one in api.ADAPTERS}
    modules = (*api.PACKAGES, *api.ADAPTERS)
    public = {(one, name) for one in modules for name in importlib.import_module(one).__all__}
    assert ours <= public | adapters


@pytest.mark.parametrize(
    ("package", "name"),
    [(one, name) for one in api.PACKAGES for name in importlib.import_module(one).__all__],
)
def test_a_public_name_is_typed_and_says_what_it_is(package, name):
    is_typed_and_says_what_it_is(package, name)


@pytest.mark.parametrize("adapter", api.ADAPTERS)
def test_so_are_the_names_of_an_adapter_which_are_all_that_it_makes_public(adapter):
    module = importlib.import_module(adapter)
    for name in module.__all__:
        assert getattr(module, name).__module__ == adapter
        is_typed_and_says_what_it_is(adapter, name)


def is_typed_and_says_what_it_is(package, name):
    value = getattr(importlib.import_module(package), name)
    said = api.docstring(package, name)
    assert said
    assert not said.startswith(f"{name}("), "made by dataclasses"
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value):
        own = (getattr(one, "fget", getattr(one, "__func__", one)) for one in vars(value).values())
        functions = [
            one
            for one in own
            if inspect.isfunction(one) and one.__code__.co_filename == inspect.getfile(value)
        ]  # the others are made by dataclasses and the like
    for function in functions:
        signature = inspect.signature(function)
        untyped = [
            parameter.name
            for number, parameter in enumerate(signature.parameters.values())
            if parameter.annotation is parameter.empty
            if not (number == 0 and function is not value)  # self
        ]
        assert not untyped, function.__qualname__
        assert signature.return_annotation is not signature.empty, function.__qualname__
