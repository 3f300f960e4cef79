"""`perdure generate`: parses and calls, nothing more."""

import argparse
from pathlib import Path

from trainer.cli.parser import Commands, add_command

GENERATE_EXAMPLES = """\
examples:
  perdure generate runs/quickstart --prompt "The river"
  perdure generate runs/quickstart/checkpoints/step-00000300 --prompt "The" --temperature 0
"""


def add_generate_command(commands: Commands) -> None:
    """Add the command to a parser."""
    generate = add_command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    generate.add_argument("checkpoint", type=Path, help="run, checkpoint or Hugging Face directory")
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    generate.add_argument("--top-k", type=int, default=50, help="sample among the k likeliest")
    generate.add_argument("--seed", type=int, default=0, help="default 0")
    generate.add_argument("--family", metavar="MODULE:NAME", help="model.family, of your own")
    generate.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import find_checkpoint

    directory = arguments.checkpoint
    if not (directory / "config.json").exists():
        directory = find_checkpoint(directory)
    import torch  # not before there is something to load

    from trainer.tools.generate import generate

    pieces = generate(
        directory,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
        family=arguments.family,
    )
    print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
