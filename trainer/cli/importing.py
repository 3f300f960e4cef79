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
    arguments, ranks = "--training-args args.json", "--ranks 8"
    both = f"{ranks} {arguments}"
    for kind, source, meta, file, option in (
        ("deepspeed", "a DeepSpeed configuration", "DS_CONFIG", "ds_config.json", both),
        ("accelerate", "an accelerate configuration", "CONFIG", "accelerate.yaml", arguments),
        ("training-args", "Hugging Face's TrainingArguments", "ARGS", "args.json", ranks),
    ):
        name = f"import-{kind}"
        examples = EXAMPLES.format(name=name, file=file, option=option)
        command = add_command(commands, name, f"turn {source} into a recipe", examples)
        add = command.add_argument
        syntax = "YAML" if meta == "CONFIG" else "JSON"
        add("config", type=local_path, metavar=meta, help=f"{syntax} file")
        add("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")
        add("--out", type=local_path, metavar="FILE", help="recipe to write (else: print)")
        what = "GPUs of the original run, if the file does not say"
        add("--ranks", type=at_least(1), metavar="N", help=what)
        if meta != "ARGS":
            what = "JSON file of TrainingArguments, with the values that the Trainer fills in"
            add("--training-args", type=local_path, metavar="FILE", help=what)
        add("--allow-unknown", action="store_true", help="accept unknown keys")
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
