"""Command line of `perdure import-deepspeed`, `import-accelerate` and `import-training-args`."""

import argparse

from elastic.exits import EXIT_DONE
from trainer.cli.parser import Commands, add_command, at_least, local_path, write_new

EXAMPLES = """\
examples:
  perdure {name} {file}
  perdure {name} {file} --out recipe.yaml run.dir=runs/mine run.steps=5000 \\
    model.init_from=Qwen3-0.6B data.sources='[{{path: data/corpus}}]' data.seq_len=2048
  perdure {name} {file} {option}

Reports each key of the file: its translation into recipe keys, or why it has none, and what
differs. Also reports each default that differs. Keys of a recipe that the file does not determine
stay open: `perdure train` names them.
"""


def add_import_command(commands: Commands) -> None:
    for name, what, meta, file, option in (
        (
            "import-deepspeed",
            "turn a DeepSpeed configuration into a recipe",
            "DS_CONFIG",
            "ds_config.json",
            "--ranks 8 --training-args args.json",
        ),
        (
            "import-accelerate",
            "turn an accelerate configuration into a recipe",
            "CONFIG",
            "accelerate.yaml",
            "--training-args args.json",
        ),
        (
            "import-training-args",
            "turn Hugging Face's TrainingArguments into a recipe",
            "ARGS",
            "args.json",
            "--ranks 8",
        ),
    ):
        examples = EXAMPLES.format(name=name, file=file, option=option)
        command = add_command(commands, name, what, examples)
        kind = "YAML file" if meta == "CONFIG" else "JSON file"
        command.add_argument("config", type=local_path, metavar=meta, help=kind)
        command.add_argument(
            "overrides", nargs="*", metavar="key.sub=value", help="recipe overrides"
        )
        command.add_argument(
            "--out", type=local_path, metavar="FILE", help="recipe to write (else: print)"
        )
        command.add_argument(
            "--ranks",
            type=at_least(1),
            metavar="N",
            help="GPUs of the original run, if the file does not say",
        )
        if meta != "ARGS":
            command.add_argument(
                "--training-args",
                type=local_path,
                metavar="FILE",
                help="JSON file of Hugging Face's TrainingArguments, with the values that the "
                "Trainer fills in",
            )
        command.add_argument("--allow-unknown", action="store_true", help="accept unknown keys")
        command.set_defaults(run=_import, importer=name)


def _import(arguments: argparse.Namespace) -> int:
    from trainer.tools.importing.accelerate import import_accelerate
    from trainer.tools.importing.deepspeed import import_deepspeed
    from trainer.tools.importing.training_arguments import import_training_arguments

    config, overrides = arguments.config, arguments.overrides
    common = {"ranks": arguments.ranks, "allow_unknown": arguments.allow_unknown}
    if arguments.importer == "import-training-args":
        imported = import_training_arguments(config, overrides, **common)
    else:
        both = {"import-deepspeed": import_deepspeed, "import-accelerate": import_accelerate}
        importer = both[arguments.importer]
        imported = importer(config, overrides, training_arguments=arguments.training_args, **common)
    if arguments.out is None:
        print(imported.recipe(), end="")
        return EXIT_DONE
    imported.launch = imported.launch.replace("RECIPE.yaml", str(arguments.out))
    write_new(arguments.out, imported.recipe(), "choose another --out")
    print("\n".join(imported.report()))
    still = f"; fill in {', '.join(imported.open)}" if imported.open else ""
    print(f"{arguments.out}: written{still}")
    return EXIT_DONE
