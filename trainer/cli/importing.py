"""`perdure import-deepspeed`: parses and calls, nothing more."""

import argparse

from elastic.exits import EXIT_DONE
from trainer.cli.parser import Commands, add_command, at_least, local_path, write_new

IMPORT_EXAMPLES = """\
examples:
  perdure import-deepspeed ds_config.json
  perdure import-deepspeed ds_config.json --out recipe.yaml run.dir=runs/mine run.steps=5000 \\
    model.init_from=Qwen3-0.6B data.sources='[{path: data/corpus}]' data.seq_len=2048
  perdure import-deepspeed ds_config.json --ranks 8

Every key is translated, or named as dropped with the reason. What a ds_config does not say stays
open: `perdure train` asks for it by name.
"""


def add_import_command(commands: Commands) -> None:
    """Add the command to a parser."""
    what = "turn a DeepSpeed configuration into a recipe"
    command = add_command(commands, "import-deepspeed", what, IMPORT_EXAMPLES)
    command.add_argument("config", type=local_path, metavar="DS_CONFIG", help="JSON file")
    command.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="fills in the recipe"
    )
    command.add_argument(
        "--out", type=local_path, metavar="FILE", help="recipe to write (else: print)"
    )
    command.add_argument(
        "--ranks", type=at_least(1), metavar="N", help="GPUs that the ds_config ran on"
    )
    command.add_argument(
        "--allow-unknown", action="store_true", help="drop keys that DeepSpeed does not know either"
    )
    command.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    from trainer.tools.deepspeed.translate import import_deepspeed

    imported = import_deepspeed(
        arguments.config,
        arguments.overrides,
        ranks=arguments.ranks,
        allow_unknown=arguments.allow_unknown,
    )
    if arguments.out is None:
        print(imported.recipe(), end="")
        return EXIT_DONE
    write_new(arguments.out, imported.recipe(), "choose another --out")
    print("\n".join(imported.report()))
    still = f"; fill in {', '.join(imported.open)}" if imported.open else ""
    print(f"{arguments.out}: written{still}")
    return EXIT_DONE
