"""Every optimizer class of the packages that are installed here, and what they train: a small model
of one's own."""

import importlib
import inspect
import json
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PACKAGES = (
    *("torch.optim", "pytorch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt"),
    *("came_pytorch", "torchao.optim", "apollo_torch", "heavyball", "muon", "bitsandbytes.optim"),
)
"""`muon` is the single file of Keller Jordan's repository."""
GIVEN: dict[str, dict[str, Any]] = {
    "pytorch_optimizer:BSAM": {"num_data": 64},
    "pytorch_optimizer:Ranger21": {"num_iterations": 64},
    "came_pytorch:CAME": {"lr": 1e-3},
    "heavyball:PSGDLRA": {"rank": 4},
    "heavyball:SplitOpt": {"optimizer": None},
}
"""Options without which a class cannot be made."""
MATRICES = (
    "torch.optim:Muon",
    "pytorch_optimizer:SpectralSphere",
    "muon:SingleDeviceMuon",
    "muon:Muon",
)
"""Take nothing but matrices: they get a model without biases."""
USE_MUON = (
    *("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"),
    *("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"),
)
"""Want to be told which parameters are matrices of hidden layers."""
STEPS, SAVED = 8, 4


def classes() -> dict[str, type]:
    """Optimizer classes by `module:class`, each once, in the order of PACKAGES."""
    found: dict[str, type] = {}
    for package in PACKAGES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(package)
        except ImportError:
            print(f"{package} is not installed")
            continue
        for name, kind in _of_package(package, module):
            known = kind is torch.optim.Optimizer or kind in found.values()
            if not known and not inspect.isabstract(kind):
                found[f"{package}:{name}"] = kind
    return found


def _of_package(package: str, module: Any) -> list[tuple[str, type]]:
    if package == "pytorch_optimizer":
        supported = map(module.load_optimizer, module.get_supported_optimizers())
        names = {kind.__name__ for kind in supported}
    else:
        names = {name for name in vars(module) if not name.startswith("_")}
    kinds = [(name, getattr(module, name, None)) for name in sorted(names)]
    return [
        (name, kind)
        for name, kind in kinds
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]


def recipe_of(name: str) -> list[str]:
    """Overrides of a recipe for an optimizer."""
    here, model = __name__, "Matrices" if name in MATRICES else "Net"
    options = {**GIVEN.get(name, {})}
    factory = name
    if name.partition(":")[2] in USE_MUON and name not in MATRICES and "heavyball" not in name:
        factory, options = f"{here}:with_muon", {"kind": name, **options}
    elif "bitsandbytes" in name and name.rpartition(":")[2].startswith(("LARS", "SGD")):
        options = {"lr": 1e-3, "momentum": 0.9}
    told = ", ".join(f"{key}: {_yaml(value)}" for key, value in options.items())
    return [
        f"model.factory={here}:{model}",
        f"data.factory={here}:data",
        f"optimizer.factory={factory}",
        f"optimizer.factory_options={{{told}}}",
        *("optimizer.lr=1e-3", "schedule.name=constant", "precision.dtype=fp32"),
        *("batch.global_batch=6", "batch.micro_batch=1", "run.device=cpu", "run.log_every=1"),
        *(f"run.steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=9"),
    ]


def _yaml(value: Any) -> str:
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else f"{value}"


def with_muon(groups: Sequence[dict[str, Any]], kind: str, **options: Any) -> torch.optim.Optimizer:
    """A factory: tells which parameters are matrices."""
    module, _, name = kind.partition(":")
    named = [pair for group in groups for pair in group["params"]]
    told = [
        {"params": [p for _, p in named if (p.dim() == 2) == is_matrix], "use_muon": is_matrix}
        for is_matrix in (True, False)
    ]
    made: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(told, **options)
    return made


class Net(nn.Module):
    """Wide enough for states that are kept in blocks of 256 numbers."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(12, 64, bias), nn.Tanh(), nn.Linear(64, 64, bias), nn.Tanh()
        self.net = nn.Sequential(*layers, nn.Linear(64, 12, bias))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        die_in_last_step()
        return {"loss": (self.net(x) - x.sin()).square().mean()}


def Matrices() -> Net:  # noqa: N802  # a factory of a model
    """A network whose parameters are all matrices, for optimizers that take no others."""
    return Net(bias=False)


def data() -> list[dict[str, Any]]:
    """A data set of 96 samples."""
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(12, generator=draw)} for _ in range(96)]


def die_in_last_step() -> None:
    """Kill this process in the forward pass of step STEPS, once step SAVED is in storage, if the
    environment names a run directory in `DIE_IN`."""
    run = Path(os.environ.get("DIE_IN", ""))
    if run.name and STEPS - 1 in losses(run):
        saved, until = run / f"checkpoints/step-{SAVED:08}/index.json", time.monotonic() + 20
        while not saved.exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def losses(run: Path) -> dict[int, float]:
    """Losses of a run by step."""
    found: dict[int, float] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if "lr" in record:
            found[record["step"]] = record["loss"]
    return found
