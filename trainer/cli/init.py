"""Command line of `perdure init`."""

import argparse
import re
import sys
from pathlib import Path

from elastic.exits import EXIT_DONE
from trainer.cli.parser import Commands, add_command, local_path, write_new
from trainer.recipe import RecipeError

EXAMPLES = """\
examples:
  perdure init
  perdure init --model Qwen3-0.6B --data data/mine --gpus 8xH100 --out mine.yaml
  perdure init --model quickstart --data data/wikipedia --gpus cpu

On a terminal it asks for missing options. It plans as `perdure plan` does, and writes a recipe
with a comment at each key, to be changed by hand.
"""


def add_init_command(commands: Commands) -> None:
    init = add_command(commands, "init", "write a recipe for a model, data and a machine", EXAMPLES)
    init.add_argument("--model", help="Hugging Face directory, or a name from perdure recipe ls")
    init.add_argument("--data", help="directory written by perdure data prepare")
    init.add_argument("--gpus", help="GPUs of one node: 8xH100, or cpu (default: this machine's)")
    init.add_argument("--nodes", metavar="N", help="nodes (default 1)")
    init.add_argument("--out", type=local_path, metavar="FILE", help="default: the model's name")
    init.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    from trainer.tools.init.draft import draft, this_machine, with_architecture

    # The documentation prepares data in data/NAME.
    there = sorted(str(path.parent) for path in Path("data").glob("*/index.json"))
    question = f"Prepared data{f', such as {there[0]}' if there else ' (by perdure data prepare)'}"
    names = ", ".join(with_architecture())
    model = _answer(arguments.model, "--model", f"Model, a directory or one of {names}")
    data = _answer(arguments.data, "--data", question, there[0] if len(there) == 1 else "")
    gpus = arguments.gpus or _answer(None, "--gpus", "GPUs of a node, or cpu", this_machine())
    nodes = _number(_answer(arguments.nodes, "--nodes", "Nodes", "1"))
    name = re.sub(r"[^\w.-]", "-", Path(model).name)
    out = arguments.out or Path(f"{name}.yaml")
    write_new(out, draft(model, data, gpus, nodes, str(out)), "name another --out")
    print(f"{out}: change what you like, then: perdure train {out}")
    return EXIT_DONE


def _answer(given: str | None, option: str, question: str, default: str = "") -> str:
    """Return `given`; if that is None, ask on a terminal, else return `default`. Raises RecipeError
    if the result is empty."""
    answer = given
    if answer is None and sys.stdin.isatty():
        answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip()
    if not (answer := answer or default):
        raise RecipeError(f"{option}: is required: {question[0].lower()}{question[1:]}")
    return answer


def _number(answer: str) -> int:
    if not answer.isdecimal() or int(answer) < 1:
        raise RecipeError(f"--nodes: {answer!r} is not a whole number of at least 1")
    return int(answer)
