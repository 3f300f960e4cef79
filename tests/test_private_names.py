"""Private names of torch and Python that the packages use: the installed releases have them.

A name that a module imports, or reaches from a module of torch, is looked up where it is. One that
belongs to an object is looked up in an object of that kind, which OWNERS makes.
"""

import ast
import atexit
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from tokenizers.models import BPE
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trainer.models.versions import groups_of_fsdp

ROOT = Path(__file__).parents[1]
PACKAGES = ("trainer", "elastic", "checkpointing", "lab")
DIFFERENT = ROOT / "trainer/models/versions.py"
"""It looks for its names by itself: which are there differs."""
SOURCES = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path != DIFFERENT]

Owner = Callable[[DeviceMesh], object]


def sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(nn.Linear(2, 2), mesh=mesh)


def group_of(mesh: DeviceMesh) -> Any:
    module = sharded(mesh)
    module(torch.ones(1, 2))
    return groups_of_fsdp(module)[0]


def dtensor(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.ones(2), mesh, [Replicate()])


OWNERS: dict[Owner, tuple[str, ...]] = {
    lambda mesh: nn.BatchNorm1d(2): (
        "_apply", "_buffers", "_modules", "_non_persistent_buffers_set", "_parameters",
    ),
    lambda mesh: torch.compile(nn.Linear(2, 2)): ("_orig_mod",),
    lambda mesh: torch.ones(2): ("_version",),
    lambda mesh: torch.ones(2).untyped_storage(): ("_cdata",),
    lambda mesh: torch.ops.aten.mm.default: ("_schema",),
    dtensor: ("_local_tensor", "_spec"),
    lambda mesh: mesh: ("_dim_group_names", "_pg_registry"),
    sharded: ("_get_fsdp_state", "_set_unshard_async_op"),
    lambda mesh: fully_shard.state(sharded(mesh)): (
        "_is_root", "_root_post_backward_final_callback",
    ),
    group_of: ("_all_gather_result",),
    lambda mesh: group_of(mesh).fsdp_params[0]: ("_unsharded_param",),
    lambda mesh: distributed_c10d._get_default_group(): ("_device_types", "_get_backend"),
    lambda mesh: torch.cuda: ("_is_in_bad_fork",),
    lambda mesh: BPE(): ("_resize_cache",),
    lambda mesh: atexit: ("_clear", "_run_exitfuncs"),
    lambda mesh: sys: ("_current_frames",),
}  # fmt: skip
ELSEWHERE = {
    "_asdict", "_fields", "_replace",  # of a named tuple
    "_exit",  # of os, and documented
    "_fingerprint",  # of datasets; may be missing
    "_scale",  # of torchao
    "_is_stateful", "_supports_sdpa",  # of transformers
    "_get_collator_with_removed_columns", "_remove_unused_columns",  # of transformers' Trainer
    "_every_n_train_steps",  # of Lightning's ModelCheckpoint
    "_reset_state",  # of accelerate
    "_config",  # of Azure's clients
}  # fmt: skip
"""Names that are not torch's."""

FLASH = ["query", "key", "value"]
DOCUMENTS = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
ARGUMENTS = {
    "_flash_attention_forward": [*FLASH, *DOCUMENTS, "return_debug_mask"],
    "_flash_attention_backward": [
        "grad_out", *FLASH, "out", "logsumexp", *DOCUMENTS, "rng_state", "unused",
    ],
    "_scaled_dot_product_flash_attention": [*FLASH, "dropout_p", "is_causal"],
    "_scaled_dot_product_flash_attention_for_cpu": [*FLASH, "dropout_p", "is_causal"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        "grad_out", *FLASH, "out", "logsumexp", "dropout_p", "is_causal",
    ],
    "_scaled_dot_product_attention_math": [*FLASH, "attn_mask", "dropout_p", "is_causal"],
    "_scaled_dot_product_efficient_attention": [
        *FLASH, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal",
    ],
}  # fmt: skip
"""First arguments of private operators, which are given by position."""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Local name → what it stands for, of all imports from torch."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname or "." not in alias.name:
                    found[alias.asname or alias.name] = alias.name
                else:  # import a.b: a, and a.b must be there
                    found.setdefault(alias.name.partition(".")[0], alias.name.partition(".")[0])
                    found[alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {here: what for here, what in found.items() if what.split(".")[0] == "torch"}


@cache
def used() -> tuple[set[str], set[str]]:
    """(what is reached from a module of torch, with its full name; attributes of other objects that
    none of the packages defines)."""
    reached, attributes, own = set(), set(), set()
    for path in SOURCES:
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        known = imported(nodes)
        reached |= {what for what in known.values() if any(map(private, what.split(".")))}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and private(node.attr):
                name = ast.unparse(node)
                root = name.partition(".")[0]
                if root in ("self", "cls"):
                    own.add(node.attr)
                elif root in known and name.replace(".", "").replace("_", "").isalnum():
                    reached.add(known[root] + name.removeprefix(root))
                else:
                    attributes.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.args[1] if node.func.id in ("getattr", "hasattr") else None
                if isinstance(name, ast.Constant) and private(str(name.value)):
                    attributes.add(str(name.value))
    return reached, attributes - own


def found(name: str) -> Any:
    """The object with a full name."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


def test_what_is_reached_from_modules_of_torch_is_there() -> None:
    reached, _ = used()
    assert {"torch._foreach_copy_", "torch.utils._pytree.tree_map"} <= reached
    missing = []
    for name in sorted(reached):
        try:
            found(name)
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_every_private_attribute_has_an_owner_that_has_it(mesh: DeviceMesh) -> None:
    _, attributes = used()
    stated = {name for names in OWNERS.values() for name in names} | ELSEWHERE
    assert attributes <= stated, "used, and in neither table"
    for owner, names in OWNERS.items():
        made = owner(mesh)
        assert [name for name in names if not hasattr(made, name)] == [], type(made)


def test_private_operators_take_their_arguments_in_this_order() -> None:
    reached, _ = used()
    called = {name.split(".")[3] for name in reached if name.startswith("torch.ops.aten._")}
    plain = {"_local_scalar_dense", "_grouped_mm"}  # only compared with
    assert called - plain == ARGUMENTS.keys()
    for name, expected in ARGUMENTS.items():
        operator = getattr(torch.ops.aten, name).default
        arguments = [one.name for one in operator._schema.arguments]
        assert arguments[: len(expected)] == expected, name


def test_private_functions_take_what_they_are_given() -> None:
    def takes(function: Any, *given: object, **named: object) -> None:
        inspect.signature(function).bind(*given, **named)

    takes(distributed_c10d._set_pg_timeout, 1, 2)
    takes(distributed_c10d._abort_process_group)
    takes(nn.Module._apply, nn.Linear(1, 1), torch.empty_like)
