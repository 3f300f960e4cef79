"""Command line of `perdure ckpt`."""

import argparse
from collections.abc import Callable
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.options import CheckpointOptions
from elastic.exits import EXIT_WRONG_INPUT
from trainer.cli.parser import (
    Commands,
    add_command,
    add_fields,
    add_step,
    local_path,
    whole_number,
)

EXIT_DIFFERENT = 1
RULES = {"keep": int, "keep_every": int, "keep_best": int, "best_by": str}
"""Retention rule: field of CheckpointOptions → its type."""

CKPT_EXAMPLES = """\
examples:
  perdure ckpt ls runs/quickstart
  perdure ckpt show runs/quickstart
  perdure ckpt verify runs/quickstart/checkpoints/step-00000300
  perdure ckpt diff runs/a runs/b
  perdure ckpt prune runs/quickstart --keep 2 --keep-best 1 --dry-run
  perdure ckpt export runs/quickstart out/quickstart --dtype bf16
  perdure ckpt export runs/lora out/merged --merge
  perdure ckpt export runs/lora out/best --step best
  perdure ckpt import Qwen3-0.6B out/start     # then: model.init_from: out/start

The path of a run means its newest valid checkpoint.
exit codes: 0 done (diff: equal); 1 diff: they differ; 2 wrong input, or a damaged checkpoint
"""


def add_ckpt_command(commands: Commands) -> None:
    what = "inspect, compare, convert and delete checkpoints"
    ckpt = add_command(commands, "ckpt", what, CKPT_EXAMPLES)
    commands = ckpt.add_subparsers(required=True, metavar="COMMAND")

    def command(
        run: Callable[[argparse.Namespace], int], verb: str, what: str, *paths: tuple[str, str]
    ) -> argparse.ArgumentParser:
        parser = add_command(commands, verb, what, CKPT_EXAMPLES)
        for name, meaning in paths:
            parser.add_argument(name, help=meaning)
        parser.set_defaults(run=run)
        return parser

    path, out = ("path", "run or checkpoint directory"), ("out", "new directory")
    command(_ls, "ls", "list the committed checkpoints of a run", path)
    what = "tensors and trainer state of a checkpoint (of a run: the newest)"
    show = command(_show, "show", what, path)
    what = "check every byte of a checkpoint, or of all checkpoints of a run"
    command(_verify, "verify", what, path)
    source = "run, checkpoint or Hugging Face directory"
    what = "show how two checkpoints differ"
    command(_diff, "diff", what, ("left", source), ("right", source))

    prune = command(_prune, "prune", "delete checkpoints of a run, by retention rules", path)
    add_fields(prune, CheckpointOptions, *RULES)
    prune.add_argument("--dry-run", action="store_true", help="delete nothing, only list")

    what = "write the model as a plain Hugging Face directory"
    export = command(_export, "export", what, ("path", source), out)
    add = export.add_argument
    what = "dtype of the written weights (default: as saved)"
    add("--dtype", choices=("bf16", "fp16", "fp32"), help=what)
    add("--merge", action="store_true", help="merge an adapter into its base model (in float32)")
    what = "base model of the adapter (default: the path in its configuration)"
    add("--base", type=local_path, metavar="DIR", help=what)
    what = (
        "merge an adapter trained over nf4 weights into the weights as published, instead of the "
        "weights that nf4 has rounded"
    )
    add("--into-published", action="store_true", help=what)
    add("--not-finite", action="store_true", help="export weights that are NaN or infinite, too")
    add_step(show.add_argument)
    add_step(add)
    origin = "path", "directory of Hugging Face or of torch.distributed.checkpoint"
    what = "convert a foreign checkpoint for model.init_from"
    importer = command(_import, "import", what, origin, out)
    what = "step of the written checkpoint (default: from OUT's name, else 0)"
    importer.add_argument("--step", type=whole_number, metavar="N", help=what)
    importer.add_argument("--config", metavar="FILE", help="config.json, if PATH has none")
    size = CheckpointOptions.max_shard_size
    what = f"largest weights file (default {size})"
    for parser in (export, importer):
        parser.add_argument("--max-shard-size", type=_size, default=size, metavar="SIZE", help=what)


def _size(text: str) -> int:
    try:
        return CheckpointOptions(max_shard_size=text).max_shard_bytes
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ls(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import ls

    print(ls(arguments.path))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import show

    print(show(arguments.path, arguments.step))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.inspect import verify

    result = verify(arguments.path)
    print(result)
    return EXIT_WRONG_INPUT if result.problems else 0


def _diff(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.diff import diff

    _use_one_thread()
    result = diff(arguments.left, arguments.right)
    print(result)
    return 0 if result.equal else EXIT_DIFFERENT


def _prune(arguments: argparse.Namespace) -> int:
    from checkpointing.storage.steps import read_state
    from checkpointing.tools.inspect import find_checkpoint, pruned

    options = _retention(read_state(find_checkpoint(arguments.path)), arguments)
    print(pruned(arguments.path, options, dry_run=arguments.dry_run))
    return 0


def _retention(state: dict[str, Any], arguments: argparse.Namespace) -> CheckpointOptions:
    """Return the retention rules: from the options, else from the run's recipe."""
    given = {name: getattr(arguments, name) for name in RULES}
    rules = {name: value for name, value in given.items() if value is not None}
    try:
        trained = state.get("recipe", {}).get("checkpoint", {"keep": 0})
        rules = {name: trained[name] for name in RULES if name in trained} | rules
        # The recipe is untrusted: anyone may have written the file.
        if any(type(value) is not RULES[name] for name, value in rules.items()):
            raise ValueError(f"{rules}")
        return CheckpointOptions(**rules)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{arguments.path}: the newest checkpoint names no rules to prune by ({error}); give "
            "--keep, --keep-every, --keep-best and --best-by"
        ) from error


def _export(arguments: argparse.Namespace) -> int:
    from checkpointing.storage.place import local
    from checkpointing.tools.convert import export
    from checkpointing.tools.inspect import find_source

    _use_one_thread()
    path, base = find_source(arguments.path, arguments.step), None
    if arguments.merge:
        from trainer.tools.generate import base_of

        base = base_of(local(path), arguments.base)
    elif arguments.base or arguments.into_published:
        option = "--base" if arguments.base else "--into-published"
        raise CheckpointError(f"{option}: only together with --merge")
    result = export(
        path,
        arguments.out,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        not_finite=arguments.not_finite,
        merge_into=base,
        into_published=arguments.into_published,
    )
    print(result)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from checkpointing.tools.convert import import_checkpoint

    result = import_checkpoint(
        arguments.path,
        arguments.out,
        step=arguments.step,
        config=arguments.config,
        max_shard_bytes=arguments.max_shard_size,
    )
    print(result)
    return 0


def _use_one_thread() -> None:
    import torch

    # Tensors are processed in pieces that fit the cache, so threads would mostly wait.
    torch.set_num_threads(1)
