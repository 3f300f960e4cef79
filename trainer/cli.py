"""`perdure` for people: parses and calls, nothing more."""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_WRONG_INPUT,
    SIGNALS,
    leave_at_once,
)
from elastic.process import usable_cores
from elastic.secret import SECRET_FILE
from elastic.warm import start_early
from trainer.cli_chaos import add_chaos_command
from trainer.cli_ckpt import CKPT_EXAMPLES, add_ckpt_commands
from trainer.cli_compare import add_compare_command
from trainer.cli_import import add_import_command
from trainer.cli_parser import Parser, Version
from trainer.cli_plan import add_plan_command
from trainer.cli_profile import add_profile_command
from trainer.cli_recipe import add_recipe_command
from trainer.data.options import Split
from trainer.errors import known_errors, told
from trainer.recipe import RecipeError, dump_recipe, load_recipe

TRAIN_EXAMPLES = """\
examples:
  perdure train recipes/quickstart.yaml
  perdure train recipes/quickstart.yaml run.steps=50 optimizer.lr=3e-4
  perdure train recipes/qwen3_0_6b.yaml --dry-run
  perdure train recipes/llama3_8b.yaml --nnodes 2 --rdzv-endpoint node0:29400

Starting the same recipe again resumes from the newest checkpoint in run.dir.
exit codes: 0 done; 2 wrong recipe or input; 75 told to go, state saved (requeue); 93 stopped for
good (do not requeue); 130 Ctrl-C (once: state saved); 1 anything else
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

Commands: TypeAlias = "argparse._SubParsersAction[Any]"


def main() -> None:
    """Entry point of the console command."""
    # What this starts does not look for modules in the working directory first.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    parser = _parser()
    arguments, rest = parser.parse_known_args()
    # argparse takes positional arguments in one go; overrides may also stand after options.
    if any(word.startswith("-") for word in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        code = arguments.run(arguments)
    except known_errors() as error:
        print(told(error), file=sys.stderr)
        code = EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="perdure", description="Train models that last.")
    parser.add_argument("--version", action=Version, help="of this, of Python and of torch")
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
        default=30,
        metavar="N",
        help="failures of one hour that are answered by starting the ranks again (default 30)",
    )
    train.add_argument("--local-addr", metavar="ADDRESS", help="of this node, as others reach it")
    train.add_argument(
        "--secret",
        metavar="FILE",
        help="of the nodes (default: one in run.dir; see docs/elastic.md)",
    )
    train.add_argument("--rdzv-conf", metavar="K=V,…", help="see elastic/rendezvous.py")
    train.add_argument("--rdzv-id", default="perdure", help="name of the job (default perdure)")
    train.set_defaults(run=_train)

    store = _command(commands, "store", "host the store of jobs, outside of their nodes")
    store.add_argument("--port", type=int, default=29400, help="default 29400; 0 for a free one")
    store.set_defaults(run=_store)

    data = _command(commands, "data", "prepare and inspect data sets", DATA_EXAMPLES)
    _add_data_commands(data.add_subparsers(required=True, metavar="COMMAND"))

    ckpt = _command(
        commands, "ckpt", "look at, compare, convert, delete checkpoints", CKPT_EXAMPLES
    )
    add_ckpt_commands(ckpt.add_subparsers(required=True, metavar="COMMAND"), _command)

    add_compare_command(commands, _command)
    add_chaos_command(commands, _command)
    add_plan_command(commands, _command)
    add_import_command(commands, _command)
    add_profile_command(commands, _command)

    generate = _command(commands, "generate", "continue a text", GENERATE_EXAMPLES)
    generate.add_argument("checkpoint", type=Path, help="run, checkpoint or Hugging Face directory")
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    generate.add_argument("--top-k", type=int, default=50, help="sample among the k likeliest")
    generate.add_argument("--seed", type=int, default=0, help="default 0")
    generate.set_defaults(run=_generate)

    report = _command(commands, "report", "what happened in a run, and whether nothing is lost")
    report.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    report.add_argument(
        "--check", action="store_true", help="only whether every sequence was consumed once; else 1"
    )
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page with its curves")
    report.set_defaults(run=_report)

    add_recipe_command(commands, _command)
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
    for number in SIGNALS:  # until the node's agent takes them
        signal.signal(number, leave_at_once)
    os.environ["PERDURE_LAUNCHED_AT"] = str(time.time())
    os.environ.setdefault("PERDURE_PRELOAD", "trainer.worker")
    # A store or a peer that is gone is told in a line of ours; not in a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments.secret:
        os.environ[SECRET_FILE] = arguments.secret
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        print(dump_recipe(recipe), end="")
    if not (arguments.rdzv_endpoint or arguments.nnodes == "1"):
        raise RecipeError("--nnodes: several nodes need --rdzv-endpoint HOST:PORT")
    if not arguments.dry_run:
        start_early()
    from trainer.preflight import check_launch, default_ranks

    ranks = arguments.nproc_per_node or default_ranks(recipe.run.device)
    nodes = int(arguments.nnodes.split(":")[0])
    notes = check_launch(recipe, nodes * ranks, ranks)
    if arguments.dry_run:
        for note in notes:
            print(f"# note: {note}", file=sys.stderr)
        print(f"# checked for {nodes * ranks} rank(s): this recipe can start", file=sys.stderr)
        return 0
    return _launch(arguments, ranks)


def _launch(arguments: argparse.Namespace, ranks: int) -> int:
    """Hand over to torch's elastic agent, as torchrun does; returns the exit code of the run."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    endpoint = arguments.rdzv_endpoint or "127.0.0.1:0"  # a free port, for this node alone
    torchrun = ["--rdzv-backend", "perdure", "--rdzv-endpoint", endpoint]
    torchrun += ["--rdzv-id", arguments.rdzv_id, "--nnodes", arguments.nnodes]
    # A worker of torchrun's is only a stand-in; what it loses does not count as a failure.
    torchrun += ["--nproc-per-node", str(ranks), "--max-restarts", "1000000"]
    options = [f"restarts={arguments.max_restarts}", *filter(None, [arguments.rdzv_conf])]
    torchrun += ["--rdzv-conf", ",".join(options)]
    if arguments.local_addr:
        torchrun += ["--local-addr", arguments.local_addr]
    worker = ["-m", "trainer", arguments.recipe, *arguments.overrides]
    sys.argv = ["torchrun", *torchrun, *worker]  # for the agent, which looks at what it starts
    config, command, command_arguments = config_from_args(parse_args(sys.argv[1:]))
    try:
        elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        known = {EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE, EXIT_INTERRUPTED} & codes
        return min(known, default=EXIT_FAILED)
    except RendezvousError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except SignalException as stopped:  # SIGHUP or SIGQUIT
        print(f"ended by {signal.Signals(stopped.sigval).name}; the same command resumes")
        return EXIT_REQUEUE
    return EXIT_DONE


def _store(arguments: argparse.Namespace) -> int:
    from elastic.store import serve

    serve(arguments.port)
    return EXIT_DONE


# --- data ------------------------------------------------------------------------------------


def _add_data_commands(commands: Commands) -> None:
    prepare = _command(commands, "prepare", "turn text into tokenised shards", DATA_EXAMPLES)
    prepare.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="txt, md, json, jsonl (also .gz, .zst), parquet or arrow files, directories, or "
        "wikipedia, stdlib",
    )
    prepare.add_argument("--out", type=Path, required=True, help="directory of the data set")
    prepare.add_argument("--tokenizer", help="tokenizer.json, its directory, or: bytes")
    prepare.add_argument("--train-bpe", type=int, metavar="N", help="train a BPE of N tokens")
    prepare.add_argument("--eos", metavar="TOKEN", help="token that ends a document")
    prepare.add_argument("--field", default="text", help="field or column (default text)")
    prepare.add_argument(
        "--split-documents",
        choices=get_args(Split),
        default="auto",
        help="what one document is in txt and md files (default auto: by a look at each)",
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
        "--workers", type=int, default=usable_cores(), help="default: one per core"
    )
    prepare.set_defaults(run=_data_prepare)
    inspect = _command(commands, "inspect", "show what a data set holds", DATA_EXAMPLES)
    inspect.add_argument("path", type=Path, help="directory of the data set")
    inspect.add_argument("--verify", action="store_true", help="check every byte")
    inspect.set_defaults(run=_data_inspect)


def _data_prepare(arguments: argparse.Namespace) -> int:
    from multiprocessing.resource_tracker import ensure_running

    from trainer.data.prepare import prepare

    # Blocked, here and in the workers: they end with this process, without tracebacks of their own.
    # The tracker comes first, as its start would unblock it.
    ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_preparing, daemon=True).start()
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


def _stop_preparing() -> NoReturn:
    signal.sigwait({signal.SIGINT})
    os.write(sys.stderr.fileno(), b"\nstopped by Ctrl-C; the same command goes on where it was\n")
    os._exit(EXIT_INTERRUPTED)


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
    from checkpointing.inspect import find_checkpoint

    directory = arguments.checkpoint
    if not (directory / "config.json").exists():
        directory = find_checkpoint(directory)
    import torch  # not before there is something to load

    from trainer.generate import generate

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


# --- report ----------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> int:
    from elastic.history import LedgerError, read_history
    from trainer.report import check, report

    directory = arguments.run_directory
    try:
        if arguments.check:
            fine, text = check(read_history(directory), directory)
            print(text)
            return EXIT_DONE if fine else EXIT_FAILED
        if arguments.html:
            from trainer.report_html import report_html

            arguments.html.write_text(report_html(directory), encoding="utf-8")
            print(f"{arguments.html}: open it in a browser")
            return EXIT_DONE
        print(report(directory))
    except (LedgerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    main()
