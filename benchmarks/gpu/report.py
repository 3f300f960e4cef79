"""Results in the tree: `benchmarks/results/gpu-NAME.json` for each GPU, and `docs/gpu.md` from all
of them. Needs no torch."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, SLICES, Case, Figures, judge
from benchmarks.gpu.driver import ROOT, State, source, write_json
from trainer.text import wrapped

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"
SHOWN = 4
"""Figures of a case without bounds."""

Record = Mapping[str, Any]
"""An entry of the state, and `before`: the figures that other code had."""

INTRODUCTION = """\
# On a GPU

Made by `python -m benchmarks.gpu --report`; changes by hand are lost. Set on a GPU:

- `strategy.compile: true`. The first step takes longer, and [a restart finds the
  result](strategies.md#options).
- FlashAttention-3 or -4, where [it runs](data.md#attention-inside-documents). A line at the start
  names the kernel.
- `batch.micro_batch: auto` takes what the memory holds. `perdure plan` says it before.
- [Moments and weights in fewer bytes](strategies.md#weights-and-state-in-fewer-bytes) for a larger
  model, [products in 8 bits](strategies.md#products-in-8-bits) for speed.

## Measure yours

```sh
make gpu-wheelhouse          # where there is a registry: packages for a GPU machine without one
make gpu                     # on the GPU machine: all that fits into 520 seconds; again: the rest
```

`make gpu` needs a Python with torch for CUDA and `transformers`, and no network. All cases take
about eight calls. Other packages come from `.gpu/wheels`; nothing outside of the folder `.gpu`
changes. Take it along, and bring it back: `.gpu/state.json` holds each result at once. A case that
fails, dies or hangs leaves the others alone.

| option of `python -m benchmarks.gpu` | |
|---|---|
| `--budget SECONDS` | a case is begun only if the time left is enough for it |
| `--only 0,1,speed.perdure` | slices by number, cases by the beginning of their name |
| `--retry` | run again what failed |
| `--out DIR` | copy results, this page, state and logs there |
| `--device cpu --size toy` | the same ways without a GPU, in minutes; its figures mean nothing |
| `--report` | write results and this page from the state |

Exit code 0: all that was asked passes; 1: something falls short; 3: something is not measured.

**Method.** Data are synthetic documents as long as those of C4, with a vocabulary of 151,936.
Models of 0.6B to 8B are Qwen3, `llama_8B` is Llama 3.1. The number after them is the micro-batch,
and `causal` is without document masks. The peer `minimal` is a
[loop](../benchmarks/peers/minimal_loop.py) with the same model, kernels and compilation, and
nothing else. MFU is by [`family.py`](../trainer/models/family.py), against the dense bf16 peak of
the data sheet. The trainer leaves out FSDP2 on one rank; `fsdp_units` says that a case has put it
back. "The last result" is that of earlier code. `make gpu` prints the limits of each case.
"""


def slug(gpu: str) -> str:
    """A GPU's name in that of a file: NVIDIA H100 80GB HBM3 → h100."""
    words = re.findall(r"[A-Za-z0-9]+", gpu)
    kept = [w for w in words if not re.fullmatch(r"NVIDIA|AMD|GeForce|Tesla|\d+GB|HBM\w*", w)]
    return "-".join(kept).lower()


def results_file(gpu: str, folder: Path = RESULTS) -> Path:
    """Where the results of a GPU are."""
    return folder / f"gpu-{slug(gpu)}.json"


def read_results(path: Path) -> dict[str, Any]:
    """{"gpu": …, "cases": {name: record}}; empty where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}


def before(record: Record | None, entry: Record) -> Figures:
    """Figures of other code than that of `entry`, as far as the committed record knows them."""
    if record is None:
        return {}
    same = all(record.get(key) == entry[key] for key in ("code", "source", "torch"))
    found: Figures = record["before"] if same else record["figures"]
    return found


def take_in(state: State, folder: Path = RESULTS) -> list[Path]:
    """Bring the results of GPUs at full size from the state into the tree; the files written."""
    found: dict[str, dict[str, Any]] = {}
    for entry in state.entries.values():
        whole = entry["size"] == "full" and entry["gpu"] != "cpu"
        if whole and entry["source"] == source(entry["function"]):
            found.setdefault(entry["gpu"], {})[entry["case"]] = entry  # the newest comes last
    written = []
    for gpu, entries in found.items():
        path = results_file(gpu, folder)
        known = read_results(path)["cases"]
        records = {
            name: {**entry, "before": before(known.get(name), entry)}
            for name, entry in entries.items()
        }
        write_json(path, {"gpu": gpu, "cases": {**known, **records}})
        written.append(path)
    return written


def page(folder: Path = RESULTS) -> str:
    """docs/gpu.md."""
    measured = [read_results(path) for path in sorted(folder.glob("gpu-*.json"))]
    gpus = [result["gpu"] for result in measured]
    lines = [INTRODUCTION]
    if not measured:
        lines.append("**Nothing below is measured yet: no GPU was at hand.**\n")
    for number, title in SLICES.items():
        cases = [case for case in CASES if case.slice == number]
        shown = [one for one in cases if any(one.name in result["cases"] for result in measured)]
        lines += [f"## {number}: {title}", ""]
        if shown:
            columns = ["case", "what", *gpus]
            lines += [row(columns), row(["---"] * len(columns))]
            for case in shown:
                cells = [cell(case, result["cases"]) for result in measured]
                lines.append(row([f"`{case.name}`", summary(case.function), *cells]))
            lines.append("")
        if missing := [f"`{case.name}`" for case in cases if case not in shown]:
            lines += [wrapped(f"Not measured yet: {', '.join(missing)}."), ""]
        bounds = [bound for case in cases for bound in case.bounds if bound.source]
        if published := dict.fromkeys(f"- `{bound}`: {bound.source}." for bound in bounds):
            lines += [*map(wrapped, published), ""]
    for path, result in zip(sorted(folder.glob("gpu-*.json")), measured, strict=True):
        records = result["cases"].values()
        versions = {f"torch {record['torch']}" for record in records}
        codes = {record["code"] for record in records}
        dates = sorted({record["date"] for record in records})
        said = wrapped(
            f"{result['gpu']}: {', '.join(sorted(versions))}; {len(records)} cases; "
            f"{len(codes)} states of the code; {dates[0]} to {dates[-1]}; "
            f"[all figures](../benchmarks/results/{path.name})."
        )
        lines.append(f"{said}\n")
    return "\n".join(lines).rstrip() + "\n"


def row(cells: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cell(case: Case, records: Mapping[str, Record]) -> str:
    """Verdict and figures of a case on one GPU."""
    record = records.get(case.name)
    if record is None:
        return "not measured yet"
    figures = {n: r["figures"] for n, r in records.items() if r["status"] == "done"}
    verdict, why = judge(case, record, figures, record["before"], "full")
    numbers = {n: v for n, v in record["figures"].items() if isinstance(v, int | float)}
    shown = [bound.figure for bound in case.bounds] or list(numbers)[:SHOWN]
    values = [f"{name} {numbers[name]:.4g}" for name in dict.fromkeys(shown) if name in numbers]
    return "; ".join([f"**{verdict}**", *values, *why])


def summary(function: str) -> str:
    """The first sentence of what a case says of itself, read without importing it."""
    module, _, name = function.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    made = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    text = " ".join((ast.get_docstring(made) or "").split("\n\n")[0].split())
    return text.rstrip(".")
