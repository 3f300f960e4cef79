"""`perdure` for people: parses and calls, nothing more."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from trainer.__main__ import EXIT_WRONG_INPUT, known_errors
from trainer.cli_ckpt import CKPT_EXAMPLES, add_ckpt_commands
from trainer.recipe import RecipeError, dump_recipe, load_recipe, recipe_schema
from trainer.reference import recipe_reference

TRAIN_EXAMPLES = """\
examples:
  perdure train recipes/quickstart.yaml
  perdure train recipes/quickstart.yaml run.steps=50 optimizer.lr=3e-4
  perdure train recipes/qwen3_0_6b.yaml --dry-run
  perdure train recipes/llama3_8b.yaml --nnodes 2 --rdzv-endpoint node0:29400

Starting the same recipe again resumes from the newest checkpoint in run.dir.
exit codes: 0 done; 2 wrong recipe or input; 93 stopped for good (do not requeue); 1 anything else
"""
DATA_EXAMPLES = """\
examples:
  perdure data prepare wikipedia --out data/wikipedia --train-bpe 4096
  perdure data prepare corpus/*.jsonl.zst --out data/corpus --tokenizer Qwen3-0.6B/tokenizer.json
  perdure data prepare books/ --out data/books --tokenizer bytes --workers 8
  perdure data inspect data/corpus --verify
"""
GENERATE_EXAMPLES = """\
examples:
  perdure generate runs/quickstart --prompt "The river"
  perdure generate runs/quickstart/checkpoints/step-00000300 --prompt "The" --temperature 0
"""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main() -> None:
    """Entry point of the console command."""
    arguments = _parser().parse_args()
    try:
        code = arguments.run(arguments)
    except known_errors() as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_WRONG_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="perdure", description="Train models that last.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", "train a recipe, or go on with it", TRAIN_EXAMPLES)
    train.add_argument("recipe", help="YAML file")
    train.add_argument("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    train.add_argument("--nnodes", default="1", metavar="N or MIN:MAX", help="nodes (default 1)")
    train.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks on this node (default: one per GPU; without GPUs 2)",
    )
    train.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="needed with several nodes")
    train.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often to start the ranks again by itself (default 0)",
    )
    train.add_argument("--rdzv-id", default="perdure", help="name of the job (default perdure)")
    train.set_defaults(run=_train)

    data = _command(commands, "data", "prepare and inspect data sets", DATA_EXAMPLES)
    _add_data_commands(data.add_subparsers(required=True, metavar="COMMAND"))

    ckpt = _command(
        commands, "ckpt", "look at, compare, convert, delete checkpoints", CKPT_EXAMPLES
    )
    add_ckpt_commands(ckpt.add_subparsers(required=True, metavar="COMMAND"), _command)

    generate = _command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    generate.add_argument("checkpoint", type=Path, help="run, checkpoint or Hugging Face directory")
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    generate.add_argument("--top-k", type=int, default=50, help="sample among the k likeliest")
    generate.add_argument("--seed", type=int, default=0, help="default 0")
    generate.set_defaults(run=_generate)

    reference = _command(commands, "recipe", "the recipe reference or JSON Schema, made from code")
    reference.add_argument("what", choices=("reference", "schema"))
    reference.set_defaults(run=_recipe)
    return parser


def _command(
    commands: Commands,
    name: str,
    what: str,
    examples: str = "",
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


# --- train -----------------------------------------------------------------------------------


def _train(arguments: argparse.Namespace) -> int:
    os.environ["PERDURE_LAUNCHED_AT"] = str(time.time())
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        print(dump_recipe(recipe), end="")
    if not (arguments.rdzv_endpoint or arguments.nnodes == "1"):
        raise RecipeError("--nnodes: several nodes need --rdzv-endpoint HOST:PORT")
    from trainer.preflight import check_inputs

    ranks = arguments.nproc_per_node or _default_ranks(recipe.run.device)
    nodes = int(arguments.nnodes.split(":")[0])
    check_inputs(recipe, 0, nodes * ranks, ranks)
    if arguments.dry_run:
        print(f"# checked for {nodes * ranks} rank(s): this recipe can start", file=sys.stderr)
        return 0
    return _launch(arguments, ranks)


def _default_ranks(device: str) -> int:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    # Two, so that what runs on a laptop is what runs on a cluster.
    return min(2, os.cpu_count() or 1)


def _launch(arguments: argparse.Namespace, ranks: int) -> int:
    """Hand over to torch's elastic agent, as torchrun does; returns the exit code of the run."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Otherwise torch's agents hand restarted ranks the store of the attempt before.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    endpoint = arguments.rdzv_endpoint or "localhost:0"  # a free port, for this node alone
    torchrun = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    torchrun += ["--rdzv-id", arguments.rdzv_id, "--nnodes", arguments.nnodes]
    torchrun += ["--nproc-per-node", str(ranks), "--max-restarts", str(arguments.max_restarts)]
    worker = ["-m", "trainer", arguments.recipe, *arguments.overrides]
    config, command, command_arguments = config_from_args(parse_args([*torchrun, *worker]))
    try:
        elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        if EXIT_WRONG_INPUT in codes:
            return EXIT_WRONG_INPUT
        return 93 if 93 in codes else 1
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        print(f"stopped by {name}; the same command resumes from the newest checkpoint")
        return 128 + stopped.sigval
    return 0


# --- data ------------------------------------------------------------------------------------


def _add_data_commands(commands: Commands) -> None:
    prepare = _command(commands, "prepare", "turn text into tokenised shards", DATA_EXAMPLES)
    prepare.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="txt, md, jsonl(.gz, .zst) or parquet files, directories, or wikipedia, stdlib",
    )
    prepare.add_argument("--out", type=Path, required=True, help="directory of the data set")
    prepare.add_argument("--tokenizer", help="tokenizer.json, its directory, or: bytes")
    prepare.add_argument("--train-bpe", type=int, metavar="N", help="train a BPE of N tokens")
    prepare.add_argument("--eos", metavar="TOKEN", help="token that ends a document")
    prepare.add_argument("--field", default="text", help="field or column (default text)")
    prepare.add_argument(
        "--split-documents",
        choices=("file", "blank-line", "line"),
        default="file",
        help="what one document is in txt and md files (default file)",
    )
    prepare.add_argument(
        "--validation-fraction", type=float, default=0.02, help="of the documents (default 0.02)"
    )
    prepare.add_argument(
        "--shard-tokens", type=int, default=1 << 28, help="tokens per shard (default 2^28)"
    )
    prepare.add_argument(
        "--on-bad", choices=("skip", "fail"), default="skip", help="bad records (default skip)"
    )
    prepare.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="default: one per core"
    )
    prepare.set_defaults(run=_data_prepare)
    inspect = _command(commands, "inspect", "show what a data set holds", DATA_EXAMPLES)
    inspect.add_argument("path", type=Path, help="directory of the data set")
    inspect.add_argument("--verify", action="store_true", help="check every byte")
    inspect.set_defaults(run=_data_inspect)


def _data_prepare(arguments: argparse.Namespace) -> int:
    from trainer.data.prepare import prepare

    options = {key: value for key, value in vars(arguments).items() if key != "run"}
    index = prepare(options.pop("inputs"), options.pop("out"), progress=True, **options)
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    print(
        f"{arguments.out}: {train['tokens']:,} training and {validation['tokens']:,} validation "
        f"tokens ({index['dtype']}, vocabulary {index['vocab_size']:,}) from "
        f"{index['documents']:,} documents; {index['rejected']:,} bad records left out"
        + (f", see {arguments.out / 'rejects.jsonl'}" if index["rejected"] else "")
    )
    return 0


def _data_inspect(arguments: argparse.Namespace) -> int:
    from trainer.data.inspect import inspect
    from trainer.data.shards import verify

    print(inspect(arguments.path))
    return _report_problems(verify(arguments.path), arguments.path) if arguments.verify else 0


def _report_problems(problems: Sequence[str], path: Path) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{path}: every byte is as it was written")
    return EXIT_WRONG_INPUT if problems else 0


# --- generate --------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from checkpointing.inspect import find_checkpoint
    from trainer.generate import generate

    directory = arguments.checkpoint
    if not (directory / "config.json").exists():
        directory = find_checkpoint(directory)
    pieces = generate(
        directory,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


# --- recipe ----------------------------------------------------------------------------------


def _recipe(arguments: argparse.Namespace) -> int:
    if arguments.what == "reference":
        print(recipe_reference(), end="")
    else:
        print(json.dumps(recipe_schema(), indent=2))
    return 0
