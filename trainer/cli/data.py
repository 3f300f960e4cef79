"""`perdure data …`: parses and calls, nothing more."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from checkpointing.format.untrusted import printable
from elastic.exits import EXIT_INTERRUPTED, EXIT_WRONG_INPUT
from elastic.process import usable_cores
from trainer.cli.parser import (
    Commands,
    add_command,
    add_fields,
    local_path,
    whole_number,
    write_output,
)
from trainer.data.prepare.options import PrepareOptions
from trainer.text import terminal_columns

DATA_EXAMPLES = """\
examples:
  perdure data prepare wikipedia --out data/wikipedia --train-bpe 4096
  perdure data prepare corpus/*.jsonl.zst --out data/corpus --tokenizer Qwen3-0.6B/tokenizer.json
  perdure data prepare books/ --out data/books --tokenizer bytes --workers 8
  perdure data prepare chats.jsonl --chat --out data/chats --tokenizer Qwen3-0.6B
  perdure data inspect data/corpus --verify
  perdure data inspect data/chats --sample 3
"""


def add_data_command(commands: Commands) -> None:
    """Add `perdure data`."""
    data = add_command(commands, "data", "prepare and inspect data sets", DATA_EXAMPLES)
    commands = data.add_subparsers(required=True, metavar="COMMAND")
    prepare = add_command(commands, "prepare", "turn text into tokenised shards", DATA_EXAMPLES)
    prepare.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="txt, md, csv, tsv, json, jsonl (each also .gz, .bz2, .xz, .zst), parquet or arrow "
        "files, directories, - for standard input, or wikipedia, stdlib",
    )
    prepare.add_argument("--out", type=local_path, help="directory of the data set")
    add_fields(prepare, PrepareOptions)
    prepare.add_argument(
        "--workers", type=int, default=usable_cores(), help="default: one per core"
    )
    prepare.set_defaults(run=_data_prepare)
    inspect = add_command(commands, "inspect", "show what a data set holds", DATA_EXAMPLES)
    inspect.add_argument("path", type=local_path, help="directory of the data set")
    inspect.add_argument("--verify", action="store_true", help="check every byte")
    inspect.add_argument(
        "--sample",
        type=whole_number,
        default=0,
        metavar="N",
        help="show the tokens of so many documents from all over the data set, by number and text; "
        "those that are trained are coloured, or, where there is no terminal, have a * before them",
    )
    inspect.add_argument(
        "--html", type=local_path, metavar="FILE", help="write the same as a page (default: of 3)"
    )
    inspect.set_defaults(run=_data_inspect)


def _data_prepare(arguments: argparse.Namespace) -> int:
    from multiprocessing.resource_tracker import ensure_running

    from trainer.data.prepare.prepare import prepare, what_to_type
    from trainer.data.shards import DataError

    # Blocked, here and in the workers: they end with this process, without tracebacks of their own.
    # The tracker comes first, as its start would unblock it.
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


def _stop_preparing() -> NoReturn:
    signal.sigwait({signal.SIGINT})
    os.write(sys.stderr.fileno(), b"\nstopped by Ctrl-C; the same command goes on where it was\n")
    os._exit(EXIT_INTERRUPTED)


def _data_inspect(arguments: argparse.Namespace) -> int:
    from trainer.data.inspect import as_page, as_text, inspect, sample
    from trainer.data.shards import verify

    print(inspect(arguments.path))
    if arguments.sample or arguments.html:
        documents = sample(arguments.path, arguments.sample or 3)
        if arguments.sample:
            columns = terminal_columns(sys.stdout)
            print(
                as_text(documents, columns, colour=bool(columns) and "NO_COLOR" not in os.environ)
            )
        if arguments.html:
            write_output(arguments.html, as_page(arguments.path, documents))
            print(f"{printable(str(arguments.html))}: {len(documents)} documents")
    return _report_problems(verify(arguments.path), arguments.path) if arguments.verify else 0


def _report_problems(problems: Sequence[str], path: Path) -> int:
    for problem in problems:
        print(f"error: {printable(problem)}", file=sys.stderr)
    if not problems:
        print(f"{path}: every byte is as it was written")
    return EXIT_WRONG_INPUT if problems else 0
