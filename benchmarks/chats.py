"""How fast chats are prepared: tokens per second of a core, beside the tokenizer alone.

A file of chats is made of pieces of Python's own sources, one to three answers each, and prepared
by one worker under the chat template of a model. The tokenizer alone encodes chats that are
rendered already, in batches, in one thread: those of the beginning of the file. Both are in seconds
of CPU time, of all processes together, so that a busy machine tells less. The memory is the most
that any process of `perdure data prepare` held; a file ten times as large must not take more.
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support import ROOT, arguments, environment, report

BATCH = 128
"""Chats in one call of the tokenizer alone."""
SHOWN_BYTES = 8 << 20
"""Bytes of the file that the tokenizer alone encodes."""


def main() -> None:
    options = arguments(__doc__ or "", megabytes="10,100", rounds=3, tokenizer="models/smollm2")
    tokenizer = (ROOT / options.tokenizer).resolve()
    if not (tokenizer / "tokenizer.json").is_file():
        sys.exit(
            f"{tokenizer}: holds no tokenizer.json; make models/smollm2 with `python "
            "examples/smollm2.py` (it needs pip install 'transformers>=5,<6' gguf accelerate), or "
            "name the directory of another model: --tokenizer DIRECTORY"
        )
    rows, figures = [], []
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        for size in map(float, options.megabytes.split(",")):
            file = Path(scratch) / f"{size:g}.jsonl"
            with file.open("w", encoding="utf-8") as output:
                output.writelines(chats(int(size * 1e6)))
            for number in range(options.rounds):
                alone = bare(file, tokenizer)
                found = prepared(file, tokenizer, Path(scratch) / f"{size:g}-{number}")
                figures.append({"megabytes": size, "bare": alone, **found})
        for size in dict.fromkeys(figure["megabytes"] for figure in figures):
            some = [figure for figure in figures if figure["megabytes"] == size]
            rows.append(
                {
                    "file, MB": f"{size:g}",
                    "tokens": f"{some[0]['tokens']:,}",
                    "tokenizer alone, tokens/s": f"{max(one['bare'] for one in some):,.0f}",
                    "prepare, tokens/s": f"{max(one['rate'] for one in some):,.0f}",
                    "ratio": ", ".join(f"{one['rate'] / one['bare']:.3f}" for one in some),
                    "most memory, MB": f"{max(one['memory'] for one in some) / 1e6:,.0f}",
                }
            )
    title = "Preparing chats beside the tokenizer alone, per second of a core"
    report(title, rows, figures, options.json)


def chats(size: int) -> Iterator[str]:
    """Lines of chats, of so many bytes together; always the same."""
    draw = random.Random(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(errors="ignore") for file in files)[:6_000_000]
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if len(part.strip()) > 40]
    while size > 0:
        messages = [{"role": "system", "content": "You are a helpful assistant."}]
        for _ in range(draw.choice([1, 1, 2, 3])):
            answer = "\n\n".join(draw.sample(parts, draw.randint(1, 4)))
            messages.append({"role": "user", "content": draw.choice(parts)[:400]})
            messages.append({"role": "assistant", "content": answer})
        line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
        size -= len(line.encode())
        yield line


def bare(file: Path, tokenizer: Path) -> float:
    """Tokens per CPU second of the tokenizer alone."""
    from trainer.data.prepare.chats import read_chat
    from trainer.data.prepare.template import ChatTemplate, read_template
    from trainer.data.tokenizer import read_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = read_template(None, tokenizer, {})
    template = ChatTemplate(source, None)
    with file.open(encoding="utf-8") as lines:
        given = [read_chat(json.loads(line)) for line in lines.readlines(SHOWN_BYTES)]
    texts = [template.marked(chat.messages, chat.tools) for chat in given]
    encoder = read_tokenizer(tokenizer / "tokenizer.json")
    began, tokens = time.process_time(), 0
    for first in range(0, len(texts), BATCH):
        found = encoder.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
        tokens += sum(len(one.ids) for one in found)
    return tokens / (time.process_time() - began)


def prepared(file: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Tokens, tokens per CPU second and most memory of `perdure data prepare`."""
    command = [sys.executable, "-m", "trainer.cli", "data", "prepare", str(file), "--chat"]
    command += ["--tokenizer", str(tokenizer), "--out", str(out), "--workers", "1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    splits = json.loads((out / "index.json").read_text())["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    return {"tokens": tokens, "rate": tokens / seconds, "memory": after.ru_maxrss * 1024}


if __name__ == "__main__":
    main()
