"""`perdure generate` and `perdure eval`: parse and call, nothing more."""

import argparse
import os

from trainer.cli.parser import Commands, add_command, add_step, local_path

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

Prompts are one a line, in a .jsonl file as {"prompt": "…"}. Each checkpoint is sampled once: what
stands in the output already is left out. --follow takes the CPU, one thread of it at low priority,
unless --device says otherwise.
"""

SAMPLING = {
    "max_new_tokens": (int, "at most so many"),
    "temperature": (float, "0: always the likeliest"),
    "top_k": (int, "sample among the k likeliest"),
    "seed": (int, "of the draws"),
}
"""Argument of `generate`, which has its default → its type and meaning."""


def add_generate_command(commands: Commands) -> None:
    """Add the command to a parser."""
    generate = add_command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    generate.add_argument(
        "checkpoint", type=local_path, help="run, checkpoint or Hugging Face directory"
    )
    generate.add_argument("--prompt", required=True, help="text to continue")
    add_step(generate.add_argument)
    _add_sampling(generate)
    generate.set_defaults(run=_generate)


def add_eval_command(commands: Commands) -> None:
    """Add the command to a parser."""
    what = "write what checkpoints of a run make of prompts, as lines of JSON"
    command = add_command(commands, "eval", what, EVAL_EXAMPLES)
    command.add_argument("run_directory", type=local_path, metavar="RUN", help="run directory")
    command.add_argument("--prompts", type=local_path, required=True, metavar="FILE")
    command.add_argument(
        "--out", type=local_path, metavar="FILE", help="is added to (default: RUN/samples.jsonl)"
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
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, help=what)
    parser.add_argument("--family", metavar="MODULE:NAME", help="model.family, of your own")


def _generate(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import find_checkpoint

    directory = arguments.checkpoint
    plain = any((directory / name).exists() for name in ("config.json", "adapter_config.json"))
    if arguments.step is not None or not plain:
        directory = find_checkpoint(directory, arguments.step)
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
    import torch

    from checkpointing.storage.place import local
    from checkpointing.tools.inspect import find_checkpoint
    from trainer.tools.generate import Sampling
    from trainer.tools.samples import follow, read_prompts, sample_steps

    run, prompts = arguments.run_directory, read_prompts(arguments.prompts)
    out = arguments.out or run / "samples.jsonl"
    given = {name: value for name, value in vars(arguments).items() if name in SAMPLING}
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.follow:
        os.nice(19)  # training comes first
        torch.set_num_threads(1)
        device = arguments.device or "cpu"
        steps = follow(run)
    else:
        steps = iter([[local(find_checkpoint(run, arguments.step))]])
    count = 0
    for some in steps:
        found = sample_steps(some, prompts, out, Sampling(**given), device, arguments.family)
        for step, count in found:
            print(f"step {step}: {count} sample(s), in {out}", flush=True)
    if not count:
        print(f"nothing new: {out} is as it was")
    return 0
