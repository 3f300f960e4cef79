"""`perdure generate` and `perdure eval`: parse and call, nothing more."""

import argparse
import os
from pathlib import Path
from typing import Any

from trainer.cli.parser import Commands, add_command, add_step, at_least, local_path, run_place

GENERATE_EXAMPLES = """\
examples:
  perdure generate runs/quickstart --prompt "The river"
  perdure generate runs/quickstart/checkpoints/step-00000300 --prompt "The" --temperature 0
"""

EVAL_EXAMPLES = """\
examples:
  perdure eval runs/sft --prompts prompts.txt
  perdure eval runs/sft --prompts prompts.jsonl --step best --temperature 0
  perdure eval runs/sft --prompts prompts.txt --follow      # beside training, until that ends
  perdure eval runs/sft --tasks hellaswag,arc_easy --limit 200
  perdure eval runs/sft --tasks capitals --include-path examples/tasks --follow

Prompts are one a line, in a .jsonl file as {"prompt": "…"}. Tasks are those of
lm-evaluation-harness (pip install 'perdure[eval]'); --include-path adds your own, in its YAML. Each
checkpoint is looked at once: what stands in the output already is left out. --follow takes one
thread of the CPU, and only time that nobody else wants, unless --device says otherwise.
"""

SAMPLING = {
    "max_new_tokens": (int, "at most so many"),
    "temperature": (float, "0: always the likeliest"),
    "top_k": (int, "sample among the k likeliest"),
    "seed": (int, "of the draws"),
}
"""Argument of `generate` with a default → its type and meaning."""


def add_generate_command(commands: Commands) -> None:
    """Add `perdure generate`."""
    generate = add_command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    generate.add_argument(
        "checkpoint",
        type=run_place,
        help="run or checkpoint (directory or s3://…), or Hugging Face directory",
    )
    generate.add_argument("--prompt", required=True, help="text to continue")
    add_step(generate.add_argument)
    _add_sampling(generate)
    generate.set_defaults(run=_generate)


def add_eval_command(commands: Commands) -> None:
    """Add `perdure eval`."""
    what = "write what checkpoints of a run make of prompts or tasks, as lines of JSON"
    command = add_command(commands, "eval", what, EVAL_EXAMPLES)
    command.add_argument("run_directory", type=local_path, metavar="RUN", help="run directory")
    of_what = command.add_mutually_exclusive_group(required=True)
    of_what.add_argument("--prompts", type=local_path, metavar="FILE", help="texts to continue")
    of_what.add_argument("--tasks", metavar="NAME,…", help="tasks of lm-evaluation-harness")
    command.add_argument(
        "--include-path", type=local_path, metavar="DIR", help="with tasks of your own"
    )
    command.add_argument(
        "--limit", type=at_least(1), metavar="N", help="take N documents of each task"
    )
    command.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="is added to (default: RUN/samples.jsonl, of tasks RUN/tasks.jsonl)",
    )
    which = command.add_mutually_exclusive_group()
    add_step(which.add_argument)
    which.add_argument("--follow", action="store_true", help="every step, as it is committed")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    _add_sampling(command)
    command.set_defaults(run=_eval)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    for name, (kind, what) in SAMPLING.items():
        option = "--" + name.replace("_", "-")
        # Left out unless given, so that the defaults of `generate` hold.
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, help=what)
    parser.add_argument("--family", metavar="MODULE:NAME", help="model.family, of your own")


def _generate(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import find_checkpoint

    directory = arguments.checkpoint
    if not isinstance(directory, Path):
        from trainer.tools.mirror import local_model

        with local_model(directory, arguments.step) as copy:
            return _say(copy, arguments)
    plain = any((directory / name).exists() for name in ("config.json", "adapter_config.json"))
    if arguments.step is not None or not plain:
        directory = find_checkpoint(directory, arguments.step)
    return _say(directory, arguments)


def _say(directory: Any, arguments: argparse.Namespace) -> int:
    """Print what the model in a directory says after a prompt."""
    import torch  # not before there is something to load

    from trainer.tools.generate import generate

    pieces = generate(
        directory,
        arguments.prompt,
        **{name: value for name, value in vars(arguments).items() if name in SAMPLING},
        device="cuda" if torch.cuda.is_available() else "cpu",
        family=arguments.family,
    )
    print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    if arguments.follow:  # it takes the time that training leaves
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import torch

    from checkpointing.storage.place import local
    from checkpointing.tools.inspect import find_checkpoint
    from trainer.tools.eval_lines import add_lines, follow

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.follow:
        torch.set_num_threads(1)
        device = arguments.device or "cpu"
    run = arguments.run_directory
    name, wanted, make = (_of_tasks if arguments.tasks else _of_prompts)(arguments, device)
    out = arguments.out or run / f"{name}s.jsonl"
    if arguments.follow:
        steps = follow(run)
    else:
        steps = iter([[local(find_checkpoint(run, arguments.step))]])
    count = 0
    for some in steps:
        for step, count in add_lines(some, wanted, out, make):
            print(f"step {step}: {count} {name}(s), in {out}", flush=True)
    if not count:
        print(f"nothing new: {out} is as it was")
    return 0


def _of_prompts(arguments: argparse.Namespace, device: str) -> tuple[str, list[Any], Any]:
    """Return (noun for a line, wanted objects, maker) for `add_lines`, to sample from prompts."""
    from trainer.tools.eval_lines import read_prompts, samples
    from trainer.tools.generate import GenerateError, Sampling

    for option in ("include_path", "limit"):
        if getattr(arguments, option) is not None:
            flag = "--" + option.replace("_", "-")
            raise GenerateError(f"{flag}: only with --tasks; remove it")
    given = {name: value for name, value in vars(arguments).items() if name in SAMPLING}
    wanted = [{"prompt": prompt} for prompt in read_prompts(arguments.prompts)]
    return "sample", wanted, samples(Sampling(**given), device, arguments.family)


def _of_tasks(arguments: argparse.Namespace, device: str) -> tuple[str, list[Any], Any]:
    """Return (noun for a line, wanted objects, maker) for `add_lines`, to evaluate tasks of
    lm-evaluation-harness."""
    from trainer.tools.generate import GenerateError

    if given := [name for name in SAMPLING if name in arguments]:
        flag = "--" + given[0].replace("_", "-")
        raise GenerateError(f"{flag}: a task says how it is sampled; remove it")
    names = list(dict.fromkeys(filter(None, arguments.tasks.split(","))))
    if not names:
        raise GenerateError("--tasks: names none; give some, such as --tasks arc_easy,hellaswag")
    try:
        from trainer.tools.harness import find_tasks, results
    except ImportError as error:
        raise GenerateError(
            f"--tasks: lm-eval cannot be used ({error}); pip install 'perdure[eval]'"
        ) from error
    manager = find_tasks(names, arguments.include_path)
    wanted = [{"task": name, "limit": arguments.limit} for name in names]
    return "task", wanted, results(manager, device, arguments.family)
