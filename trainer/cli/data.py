"""Command line of `perdure data`."""

import argparse
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from checkpointing.format.untrusted import printable
from elastic.exits import EXIT_INTERRUPTED, EXIT_WRONG_INPUT
from elastic.process import usable_cores
from trainer.cli.parser import (
    Commands,
    add_command,
    add_fields,
    at_least,
    local_path,
    place,
    run_place,
    whole_number,
    write_output,
)
from trainer.data.prepare.options import PrepareOptions
from trainer.recipe import RecipeError
from trainer.recipe.value_types import like_url, local_copy
from trainer.text import terminal_columns

DATA_EXAMPLES = """\
examples:
  perdure data prepare wikipedia --out data/wikipedia --train-bpe 4096
  perdure data prepare corpus/*.jsonl.zst --out data/corpus --tokenizer Qwen3-0.6B/tokenizer.json
  perdure data prepare books/ --out data/books --tokenizer bytes --workers 8
  perdure data prepare chats.jsonl --chat --out data/chats --tokenizer Qwen3-0.6B
  perdure data copy data/corpus s3://bucket/corpus
  perdure data inspect s3://bucket/corpus --verify
  perdure data inspect data/chats --sample 3
"""

CHANGE_EXAMPLES = """\
examples:
  perdure data change runs/base --at-step 40000 --weights wiki=0.5 code=0.5
  perdure data change runs/base --at-step 40000 --add data/math --weights wiki=2 code=2 math=1
  perdure data change runs/base --at-step 40000 --append wiki=data/wiki-2027

The run pauses once after its current step, and continues with one more stage in data.stages.
Every node must have the data under these paths.
exit codes: 0 the run has accepted the change; 2 wrong change, or the run rejects it
"""


def add_data_command(commands: Commands) -> None:
    data = add_command(commands, "data", "prepare, copy and inspect data sets", DATA_EXAMPLES)
    commands = data.add_subparsers(required=True, metavar="COMMAND")
    prepare = add_command(commands, "prepare", "turn text into tokenised shards", DATA_EXAMPLES)
    prepare.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="txt, md, csv, tsv, json, jsonl (each also .gz, .bz2, .xz, .zst), parquet or arrow "
        "files, directories, - for standard input, or wikipedia, stdlib",
    )
    prepare.add_argument("--out", type=_out, help="directory of the data set")
    add_fields(prepare, PrepareOptions)
    what = "default: one per core"
    prepare.add_argument("--workers", type=int, default=usable_cores(), help=what)
    prepare.set_defaults(run=_data_prepare)
    what = "copy a data set into an object store, or out of one"
    copy = add_command(commands, "copy", what, DATA_EXAMPLES)
    copy.add_argument("source", type=place, help="directory or URL of a data set")
    copy.add_argument("target", type=place, help="directory or URL of the copy")
    copy.set_defaults(run=_data_copy)
    inspect = add_command(commands, "inspect", "show the contents of a data set", DATA_EXAMPLES)
    inspect.add_argument("path", type=place, help="directory or URL of the data set")
    inspect.add_argument("--verify", action="store_true", help="check every byte")
    what = (
        "show the tokens of N documents, spread over the data set, with number and text; trained "
        "tokens are coloured, or, without a terminal, marked with *"
    )
    inspect.add_argument("--sample", type=whole_number, default=0, metavar="N", help=what)
    what = "write the documents of --sample (default: 3) as an HTML page"
    inspect.add_argument("--html", type=local_path, metavar="FILE", help=what)
    inspect.set_defaults(run=_data_inspect)
    _add_change(commands)


def _add_change(commands: Commands) -> None:
    what = "change the data mixture of a running run, from a step on"
    change = add_command(commands, "change", what, CHANGE_EXAMPLES)
    add = change.add_argument
    what = "run directory, or on the machine of rank 0 a folder of a bucket"
    add("run_directory", type=run_place, metavar="RUN", help=what)
    what = "last step with the present mixture"
    add("--at-step", type=at_least(1), required=True, metavar="N", help=what)
    what = "weights of the sources; sources left out pause (default: unchanged)"
    add("--weights", type=_weight, nargs="+", metavar="NAME=W", help=what)
    what = "data set to add as a source; list it in --weights, too"
    add("--add", type=_named, action="append", default=[], metavar="[NAME=]PATH", help=what)
    what = "data set whose sequences are added to a source"
    add("--append", type=_appended, action="append", default=[], metavar="NAME=PATH", help=what)
    change.set_defaults(run=_data_change, refuse=change.error)


def _data_change(arguments: argparse.Namespace) -> int:
    from trainer.tools.data_change import change_data

    if not (arguments.weights or arguments.append):
        arguments.refuse("nothing changes; give --weights or --append")
    weights = dict(arguments.weights or ())
    run = arguments.run_directory
    if not isinstance(run, Path):
        url, run = run, local_copy(str(run))
        if not run.exists():
            raise RecipeError(f"{url}: run this on the machine of rank 0, which is not this one")
    print(change_data(run, arguments.at_step, weights, arguments.add, arguments.append))
    return 0


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals else ("", text)


def _appended(text: str) -> tuple[str, str]:
    name, path = _named(text)
    if not (name and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not (name and 0 < weight < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=W with W above 0")
    return name, weight


def _data_prepare(arguments: argparse.Namespace) -> int:
    from multiprocessing.resource_tracker import ensure_running

    from trainer.data.prepare.prepare import prepare, what_to_type
    from trainer.data.shards import DataError

    # SIGINT stays blocked, so that workers end with this process and without tracebacks. The
    # resource tracker starts first, as its start would unblock the signal.
    ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_preparing, daemon=True).start()
    if arguments.out is None:
        raise DataError(what_to_type(arguments.inputs))
    options = {key: value for key, value in vars(arguments).items() if key != "run"}
    index = prepare(options.pop("inputs"), options.pop("out"), progress=True, **options)
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    trained = f", {train['trained']:,} of them trained" if "trained" in train else ""
    print(
        f"{arguments.out}: {train['tokens']:,} training{trained} and "
        f"{validation['tokens']:,} validation tokens "
        f"({index['dtype']}, vocabulary {index['vocab_size']:,}) from "
        f"{index['documents']:,} documents; {index['rejected']:,} bad records left out"
        + (f", see {arguments.out / 'rejects.jsonl'}" if index["rejected"] else "")
    )
    return 0


def _out(text: str) -> Path:
    if like_url(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL; prepare into a directory, such as data/mine, and then type: "
            f"perdure data copy data/mine {text}"
        )
    return local_path(text)


def _data_copy(arguments: argparse.Namespace) -> int:
    from trainer.data.copying import copy_data_set
    from trainer.data.shards import DataError

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    try:
        index = copy_data_set(arguments.source, arguments.target, say)
    except OSError as error:
        raise DataError(f"{error.filename or arguments.target}: {error.strerror}") from error
    tokens = sum(split["tokens"] for split in index["splits"].values())
    print(f"{arguments.target}: {tokens:,} tokens, every byte checked")
    return 0


def _stop_preparing() -> NoReturn:
    signal.sigwait({signal.SIGINT})
    os.write(sys.stderr.fileno(), b"\nstopped by Ctrl-C; the same command resumes\n")
    os._exit(EXIT_INTERRUPTED)


def _data_inspect(arguments: argparse.Namespace) -> int:
    from trainer.data.inspect import as_page, as_text, inspect, sample
    from trainer.data.shards import verify

    print(inspect(arguments.path))
    if arguments.sample or arguments.html:
        documents = sample(arguments.path, arguments.sample or 3)
        if arguments.sample:
            columns = terminal_columns(sys.stdout)
            colour = bool(columns) and "NO_COLOR" not in os.environ
            print(as_text(documents, columns, colour=colour))
        if arguments.html:
            write_output(arguments.html, as_page(arguments.path, documents))
            print(f"{printable(str(arguments.html))}: {len(documents)} documents")
    if not arguments.verify:
        return 0
    problems = verify(arguments.path)
    for problem in problems:
        print(f"error: {printable(problem)}", file=sys.stderr)
    if not problems:
        print(f"{arguments.path}: every byte is correct")
    return EXIT_WRONG_INPUT if problems else 0
