"""Lint rules: nothing lets another process or file run code, and no two classes share a name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import glossary

ROOT = Path(__file__).parent.parent
USES = [
    *("import pickle", "from pickle import loads", "import marshal", "import shelve"),
    *("import dill", "import cloudpickle", "import joblib"),
    *("from multiprocessing.connection import Client", "import multiprocessing.managers"),
    "from torch.distributed import broadcast_object_list",
    *("torch.load('x')", "torch.load('x', weights_only=True)", "numpy.load('x')"),
    *(
        f"dist.{name}([], None)"
        for name in (
            *("all_gather_object", "gather_object", "broadcast_object_list"),
            *("scatter_object_list", "send_object_list", "recv_object_list", "rpc.rpc_sync"),
        )
    ),
]

READERS = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "offload": 3, "sharding": 3, "exact": 3}
"""Keys of a recipe of which trainer/recipe/strategies knows all, and the most files that read each:
model parallelism is read only by the module of its key, so that a new kind needs few files."""


@pytest.mark.parametrize("package", ["trainer", "elastic", "checkpointing", "lab"])
def test_a_planted_unpickling_is_refused(package):
    planted = "\n".join(["import numpy", "import torch", "import torch.distributed as dist", *USES])
    found = subprocess.run(
        [Path(sys.executable).with_name("ruff"), "check", "--output-format=concise",
         "--stdin-filename", f"{package}/run/planted.py", "-"],
        input=planted, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    lines = {int(number) for number in re.findall(r"planted\.py:(\d+):\d+: TID251", found.stdout)}
    missed = [use for number, use in enumerate(USES, 4) if number not in lines]
    assert (found.returncode, missed) == (1, [])


def test_the_exceptions_are_known():
    excepted = {
        f"{path.relative_to(ROOT)}: {line.partition('#')[0].strip()}"
        for package in ("trainer", "elastic", "checkpointing", "lab")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"noqa.*TID251", line)
    }
    assert excepted == {
        "checkpointing/load/foreign.py: import pickle",
        "checkpointing/save/serving.py: from multiprocessing.connection "
        "import Connection, Listener",
        "checkpointing/save/writer.py: from multiprocessing.connection import Listener",
    }


def test_no_two_public_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for package in glossary.PACKAGES:
        for name, module, _ in glossary.classes(package):
            if not module.startswith("checkpointing.adapters."):  # named as what they extend
                homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_key_of_a_strategy_is_read_in_few_files():
    readers = {key: set() for key in READERS}
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        if not re.search(rf"\.({'|'.join(READERS)})\b", text):
            continue  # to parse all files takes seconds
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(value=ast.Name(id="strategies")):
                    pass  # the module, which is asked
                case ast.Attribute(attr=key) if key in readers:
                    readers[key].add(str(path.relative_to(ROOT)))
    assert not {key: sorted(f) for key, f in readers.items() if len(f) > READERS[key]}
