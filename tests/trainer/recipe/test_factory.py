"""What is wrong with a function of the user's is told in a line: which, where, and what to do."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trainer.optim.optimizer import build_schedule
from trainer.optim.own import build_own
from trainer.optim.slices import is_elementwise
from trainer.recipe import OptimizerSection, RecipeError, ScheduleSection
from trainer.recipe.factory import call_factory

SOUND = "def build(size=1):\n    return size\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("mine", "near_by"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("x = 1\ndef build(:\n", "build", "importing mine:build fails at HERE:2: SyntaxError: inv"),
        ("import near_by\n", "build", "fails at near_by.py:1: SyntaxError: invalid syntax"),
        ("\nimport no_such\n", "build", "fails at HERE:2: ModuleNotFoundError: No module named"),
        ("x = 1 / 0\n", "build", "importing mine:build fails at HERE:1: ZeroDivisionError: div"),
        ("import sys\nsys.exit(1)\n", "build", "fails at HERE:2: SystemExit: 1"),
        (SOUND, "biuld", "HERE has no biuld; did you mean build? it has build"),
        ("build = 3\n", "build", "mine:build is of type int, no function"),
        ("def build():\n    3\n", "build", "mine:build (HERE:1) returned None (is its `return` mi"),
        (
            "class Odd(Exception): ...\ndef build():\n    raise Odd('x')\n",
            "build",
            "HERE:3: Odd: x",
        ),
        (
            "def build(size):\n    return size\n",
            "build",
            "mine:build is called with nothing, but: ",
        ),
    ],
)
def test_the_line_and_the_way_out_are_named(folder, text, name, told):
    (folder / "near_by.py").write_text("a = = 1\n")
    (folder / "mine.py").write_text(text)
    with pytest.raises(RecipeError) as error:
        call_factory("data.factory", f"mine:{name}", {})
    message = str(error.value).replace(f"{folder}/near_by.py", "near_by.py")
    assert told in message.replace(f"{folder}/mine.py", "HERE")
    assert message.startswith("data.factory")


def test_a_module_that_is_not_there_and_a_library_in_between(folder):
    (folder / "mine.py").write_text("import json\ndef build():\n    json.loads('{')\n")
    with pytest.raises(RecipeError, match=r"No module named 'mien'; did you mean mine\? is it in"):
        call_factory("data.factory", "mien:build", {})
    with pytest.raises(RecipeError, match=r"fails at .*mine\.py:3: JSONDecodeError"):
        call_factory("data.factory", "mine:build", {})


def test_what_may_be_there_at_the_next_start_is_no_wrong_input(folder):
    (folder / "mine.py").write_text(
        "class OutOfMemory(Exception): ...\n"
        "def build(kind):\n    raise {'os': ConnectionError, 'own': OutOfMemory}[kind]('x')\n"
    )
    for kind in ("os", "own"):
        with pytest.raises(Exception, match=r"^x$") as error:
            call_factory("data.factory", "mine:build", {"kind": kind})
        assert not isinstance(error.value, RecipeError)


OPTIMIZER = """
import torch
class Mine(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {"lr": 1.0})
        self.steps = 0
    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter))
                BREAK
"""


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("self.nothing", "AttributeError: 'Mine' object has no attribute 'nothing'"),
        ("assert self.steps < 3", "AssertionError: "),
        ("state['mean'] += torch.ones(99)", "RuntimeError: The size of tensor a"),
    ],
)
def test_a_step_that_fails_is_told_before_anything_starts(folder, broken, told):
    (folder / "mine.py").write_text(OPTIMIZER.replace("BREAK", broken))
    parameters = {"weight": torch.nn.Parameter(torch.zeros(3, 2))}
    with pytest.raises(RecipeError) as error:
        build_own(parameters, OptimizerSection(lr=1.0, factory="mine:Mine"))
    assert f"the step of mine:Mine fails at {folder}/mine.py:14: {told}" in str(error.value)


def test_what_it_keeps_in_itself_is_refused(folder):
    (folder / "mine.py").write_text(OPTIMIZER.replace("BREAK", "group['seen'] = self.steps"))
    parameters = {"weight": torch.nn.Parameter(torch.ones(3, 2))}
    with pytest.raises(RecipeError, match="Mine changes steps of the optimizer itself"):
        build_own(parameters, OptimizerSection(lr=1.0, factory="mine:Mine"))


@pytest.mark.parametrize(("least", "most"), [(0.0, 20.0), (0.02, 1e9), (0.0, 1e9)])
def test_a_matrix_that_is_clipped_by_its_own_norm_is_not_cut(least, most):
    """Nor where the norm was never out of bounds: it may be later."""

    class Clipping(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                norm = parameter.grad.norm()
                parameter.sub_(parameter.grad * norm.clamp(least, most) / norm, alpha=1e-3)

    parameters = {"weight": torch.nn.Parameter(torch.zeros(40, 20))}
    assert not is_elementwise(parameters, lambda p: Clipping(p.values(), {"lr": 0.1}))


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        ("[lr][step]", "the rate of step 1 by mine:build fails at HERE:2: IndexError"),
        ("-lr if step == 777 else lr", "mine:build gives -1.0 as the learning rate of step 777"),
        ("None", "gives None as the learning rate of step 1; it must be a finite number, no ten"),
    ],
)
def test_each_of_a_thousand_rates_is_looked_at(folder, rate, told):
    (folder / "mine.py").write_text(f"def build(steps, lr):\n    return lambda step: {rate}\n")
    recipe = SimpleNamespace(
        run=SimpleNamespace(steps=1000),
        optimizer=OptimizerSection(lr=1.0),
        schedule=replace(ScheduleSection(), factory="mine:build"),
    )
    with pytest.raises(RecipeError) as error:
        build_schedule(recipe, 1000)
    assert told in str(error.value).replace(f"{folder}/mine.py", "HERE")
