"""One case, in a process of its own: `-m benchmarks.gpu.case package.module:function …`. Leaves
{"status", "why", "figures"} in the file --out, unless it dies."""

import argparse
import importlib
import json
import os
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.driver import write_json
from benchmarks.gpu.setting import Setting, UnsupportedError
from checkpointing.storage.folders import collect_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", help="package.module:function; identify; forget")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", default="full", choices=("full", "toy"))
    parser.add_argument("--options", type=json.loads, default={})
    for name in ("scratch", "data", "others", "out"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args()
    if given.function == "identify":
        print(json.dumps(identify(given.device)))
        return
    if given.function == "forget":
        forget(given.scratch)
        return
    setting = Setting(
        device=given.device,
        size=given.size,
        scratch=given.scratch,
        data=given.data,
        others=json.loads(given.others.read_text(encoding="utf-8")),
    )
    entry: dict[str, Any] = {"status": "done", "why": "", "figures": {}}
    try:
        module, _, function = given.function.partition(":")
        entry["figures"] = getattr(importlib.import_module(module), function)(
            setting, **given.options
        )
    except UnsupportedError as error:
        entry |= {"status": "unsupported", "why": str(error)}
    except Exception as error:
        traceback.print_exc()
        why = " ".join(f"{type(error).__name__}: {error}".split())
        entry |= {"status": "failed", "why": why[:600]}
    forget(given.scratch)
    write_json(given.out, entry)
    os._exit(0)  # gloo sometimes aborts in interpreter shut-down


def identify(device: str) -> dict[str, str]:
    """torch's version, and the name of the device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device")
    gpu = device != "cpu" and torch.cuda.is_available()
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if gpu else "cpu"}


def forget(scratch: Path) -> None:
    """Give back the shared memory that runs in this folder have left for a restart."""
    for run in filter(Path.is_dir, scratch.iterdir()):
        collect_memory(str((run / "checkpoints").absolute()))


if __name__ == "__main__":
    main()
