"""What `elastic/`, `perdure train` and pipelines rely on in private parts of torch, by its source.

Checked for the installed torch, and for another one whose wheel was unpacked somewhere:
`TORCH_SOURCE=DIR pytest tests/elastic/test_torch_contract.py` (nothing of it is imported).
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.rendezvous import PerdureRendezvous

SOURCES = [Path(torch.__file__).parents[1], *map(Path, filter(None, [os.getenv("TORCH_SOURCE")]))]


@pytest.fixture(params=SOURCES, ids=str)
def distributed(request: pytest.FixtureRequest) -> Path:
    return Path(request.param) / "torch/distributed"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(path: Path, *names: str) -> ast.ClassDef | ast.FunctionDef:
    """A class or function of a file, or what is defined in it by a path of names."""
    found: ast.AST = tree(path)
    for name in names:
        found = next(
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        )
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    return found


def parameters(function: ast.ClassDef | ast.FunctionDef) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def used_of_handlers(paths: Iterator[Path]) -> set[str]:
    """Names that are asked of a `rdzv_handler`."""
    found = set()
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name == "rdzv_handler":
                    found.add(node.attr)
    return found


def test_the_agent_asks_only_for_what_the_handler_has(distributed: Path) -> None:
    asked = used_of_handlers((distributed / "elastic/agent").rglob("*.py"))
    asked |= used_of_handlers((distributed / "launcher").rglob("*.py"))
    assert {"next_rendezvous", "num_nodes_waiting", "shutdown"} <= asked
    assert asked <= set(vars(PerdureRendezvous)), "asked for, and not defined by the handler"


def test_the_handler_defines_all_that_is_abstract(distributed: Path) -> None:
    base = definition(distributed / "elastic/rendezvous/api.py", "RendezvousHandler")
    abstract = {
        node.name
        for node in base.body
        if isinstance(node, ast.FunctionDef)
        and any("abstract" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(abstract) >= 7
    assert abstract <= set(vars(PerdureRendezvous))


def test_what_the_handler_makes_and_is_given(distributed: Path) -> None:
    api = distributed / "elastic/rendezvous/api.py"
    assert parameters(definition(api, "RendezvousInfo", "__init__")) == [
        "self",
        "store",
        "rank",
        "world_size",
        "bootstrap_store_info",
    ]
    fields = [
        ast.unparse(node.target)
        for node in definition(api, "RendezvousStoreInfo").body
        if isinstance(node, ast.AnnAssign)
    ]
    assert [field for field in fields if field.islower()] == ["master_addr", "master_port"]
    given = parameters(definition(api, "RendezvousParameters", "__init__"))
    assert given[1:7] == ["backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"]


def test_how_the_handler_is_found_and_the_agent_is_started(distributed: Path) -> None:
    assert "torchrun.handlers" in (distributed / "elastic/rendezvous/registry.py").read_text()
    run = distributed / "run.py"
    assert parameters(definition(run, "config_from_args")) == ["args"]
    assert parameters(definition(run, "parse_args")) == ["args"]
    launch = definition(distributed / "launcher/api.py", "elastic_launch", "__call__")
    assert isinstance(launch, ast.FunctionDef)
    assert launch.args.vararg
    # The handler takes SIGTERM itself, and tells torchrun so.
    signals = (distributed / "elastic/multiprocessing/api.py").read_text()
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" in signals


def test_what_a_pipeline_takes_to_put_off_the_gradients_of_weights(distributed: Path) -> None:
    backward = distributed / "pipelining/_backward.py"
    of_inputs = definition(backward, "stage_backward_input")
    given = ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]
    assert parameters(of_inputs) == given
    assert isinstance(of_inputs, ast.FunctionDef)
    assert of_inputs.returns
    assert "list[dict[str, Any]]" in ast.unparse(of_inputs.returns), "groups come second"
    of_weights = definition(backward, "stage_backward_weight")
    assert parameters(of_weights)[:2] == ["weights", "param_groups"]
    last = definition(
        distributed / "fsdp/_fully_shard/_fsdp_state.py",
        "FSDPState",
        "_root_post_backward_final_callback",
    )
    assert parameters(last) == ["self"]


def test_the_time_that_a_group_waits_can_be_set(distributed: Path) -> None:
    path = distributed / "distributed_c10d.py"
    assert parameters(definition(path, "_set_pg_timeout")) == ["timeout", "group"]
    assert definition(path, "_World", "pg_map")
