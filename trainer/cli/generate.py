"""Command line of `perdure generate` and `perdure eval`."""

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

A prompts file has one prompt a line; a .jsonl file, {"prompt": "…"} a line. Tasks are those of
lm-evaluation-harness (pip install 'perdure[eval]'); --include-path adds your own, in its YAML.
Results that the output has already are not computed again. --follow uses one CPU thread at idle
priority, unless --device says otherwise.
"""

SAMPLING = {
    "max_new_tokens": (int, "most new tokens"),
    "temperature": (float, "sampling temperature; 0: always the likeliest token"),
    "top_k": (int, "sample among the k likeliest tokens"),
    "seed": (int, "seed of the sampling"),
}
"""Argument of `trainer.tools.generate.generate` that is also an option → its type and help."""


def add_generate_command(commands: Commands) -> None:
    generate = add_command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    what = "run or checkpoint (directory or s3://…), or Hugging Face directory"
    generate.add_argument("checkpoint", type=run_place, help=what)
    generate.add_argument("--prompt", required=True, help="text to continue")
    add_step(generate.add_argument)
    _add_sampling(generate)
    generate.set_defaults(run=_generate)


def add_eval_command(commands: Commands) -> None:
    what = "sample from checkpoints of a run, or evaluate them on tasks, into a JSON Lines file"
    command = add_command(commands, "eval", what, EVAL_EXAMPLES)
    add = command.add_argument
    add("run_directory", type=local_path, metavar="RUN", help="run directory")
    inputs = command.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--prompts", type=local_path, metavar="FILE", help="texts to continue")
    inputs.add_argument("--tasks", metavar="NAME,…", help="tasks of lm-evaluation-harness")
    add("--include-path", type=local_path, metavar="DIR", help="folder of your own tasks")
    add("--limit", type=at_least(1), metavar="N", help="evaluate N documents of each task")
    what = "file to append to (default: RUN/samples.jsonl, or RUN/tasks.jsonl for tasks)"
    add("--out", type=local_path, metavar="FILE", help=what)
    which = command.add_mutually_exclusive_group()
    add_step(which.add_argument)
    what = "evaluate every checkpoint as it is committed, until training ends"
    which.add_argument("--follow", action="store_true", help=what)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    _add_sampling(command)
    command.set_defaults(run=_eval)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    for name, (kind, what) in SAMPLING.items():
        option = "--" + name.replace("_", "-")
        # Absent options stay out of the namespace, so that the defaults of `generate` apply.
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, help=what)
    parser.add_argument("--family", metavar="MODULE:NAME", help="your own model.family")


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
    import torch  # slow to import; not needed for wrong paths

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
    if arguments.follow:  # at idle priority, so that training is not slowed down
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import torch

    from checkpointing.storage.place import local
    from checkpointing.tools.inspect import find_checkpoint
    from trainer.tools.eval_lines import add_lines, checkpoints_of, follow

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
        directory = checkpoints_of(run)
        place = directory if directory.is_dir() else run  # RUN may also be a checkpoint
        steps = iter([[local(find_checkpoint(place, arguments.step))]])
    count = 0
    for checkpoints in steps:
        for step, count in add_lines(checkpoints, wanted, out, make):
            print(f"step {step}: {count} {name}(s), in {out}", flush=True)
    if not count:
        print(f"nothing new: {out} is unchanged")
    return 0


def _of_prompts(arguments: argparse.Namespace, device: str) -> tuple[str, list[Any], Any]:
    """Return (noun for messages, keys of the lines to write, function that makes the lines)."""
    from trainer.tools.eval_lines import read_prompts, samples
    from trainer.tools.generate import GenerateError, GenerationSampling

    for option, value in (
        ("--include-path", arguments.include_path),
        ("--limit", arguments.limit),
    ):
        if value is not None:
            raise GenerateError(f"{option}: works only with --tasks; remove it")
    given = {name: value for name, value in vars(arguments).items() if name in SAMPLING}
    wanted = [{"prompt": prompt} for prompt in read_prompts(arguments.prompts)]
    return "sample", wanted, samples(GenerationSampling(**given), device, arguments.family)


def _of_tasks(arguments: argparse.Namespace, device: str) -> tuple[str, list[Any], Any]:
    from trainer.tools.generate import GenerateError

    if given := [name for name in SAMPLING if name in arguments]:
        flag = "--" + given[0].replace("_", "-")
        raise GenerateError(f"{flag}: tasks set their own sampling; remove it")
    names = list(dict.fromkeys(filter(None, arguments.tasks.split(","))))
    if not names:
        raise GenerateError("--tasks: lists no task; name one, such as --tasks arc_easy,hellaswag")
    try:
        from trainer.tools.harness import find_tasks, results
    except ImportError as error:
        raise GenerateError(
            f"--tasks: lm-eval cannot be used ({error}); pip install 'perdure[eval]'"
        ) from error
    manager = find_tasks(names, arguments.include_path)
    wanted = [{"task": name, "limit": arguments.limit} for name in names]
    return "task", wanted, results(manager, device, arguments.family)
