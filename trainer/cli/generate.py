"""`perdure generate`: parses and calls, nothing more."""

import argparse

from trainer.cli.parser import Commands, add_command, local_path

GENERATE_EXAMPLES = """\
examples:
  perdure generate runs/quickstart --prompt "The river"
  perdure generate runs/quickstart/checkpoints/step-00000300 --prompt "The" --temperature 0
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
    for name, (kind, what) in SAMPLING.items():
        option = "--" + name.replace("_", "-")
        generate.add_argument(option, type=kind, default=argparse.SUPPRESS, help=what)
    generate.add_argument("--family", metavar="MODULE:NAME", help="model.family, of your own")
    generate.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import find_checkpoint

    directory = arguments.checkpoint
    if not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
        directory = find_checkpoint(directory)
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
