"""Holds docs/grafana.json against Grafana's own types, and asks each of its queries of a real
Prometheus that reads a run through a real node exporter, while a rank of the run is killed.

    python -m tests.opt_in.grafana      (make grafana)

A panel without an answer is an error, but for values that this run cannot have.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from lab.local_nodes import LocalNodes, free_port

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "docs" / "grafana.json"
ABSENT = {"perdure_mfu", "perdure_checkpoint_failed"}
"""A CPU has no known peak, and no save fails here."""
UNTYPED = {"titleFormat", "textFormat"}
"""Keys of an annotation that Grafana's plug-in for Prometheus knows, and the types do not."""
RECIPE = """\
run: {dir: run, steps: 400, log_every: 2, evaluate_every: 50, device: cpu}
model:
  architecture:
    {model_type: qwen3, vocab_size: 257, hidden_size: 64, intermediate_size: 128,
     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}
data: {sources: [{path: data}], seq_len: 128, validation_sequences: 8}
batch: {global_batch: 8, micro_batch: 2}
optimizer: {lr: 1e-3}
precision: {dtype: fp32}
checkpoint: {every: 20}
elastic: {snapshot_every: 1}
tracking: {prometheus: exported/run.prom}
"""


def main() -> None:
    """Check the types, then the queries."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(board).to_json(), cls=JSONEncoder))
    if lost := [path for path in missing(board, again) if path.rpartition("/")[2] not in UNTYPED]:
        sys.exit(f"{BOARD}: Grafana's types do not know {', '.join(lost)}")
    print(f"{len(board['panels'])} panels are what Grafana's types say")
    with TemporaryDirectory(prefix="perdure-grafana-") as folder, ExitStack() as stack:
        unanswered = ask(board, Path(folder), stack)
    if unanswered:
        sys.exit(f"no value for {', '.join(unanswered)}")


def missing(whole: Any, part: Any, path: str = "") -> Iterator[str]:
    """Paths of what `part` lacks of `whole`, or has otherwise."""
    if isinstance(whole, dict) and isinstance(part, dict):
        for key, value in whole.items():
            if key in part:
                yield from missing(value, part[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(whole, list) and isinstance(part, list) and len(whole) == len(part):
        for number, (one, other) in enumerate(zip(whole, part, strict=True)):
            yield from missing(one, other, f"{path}/{number}")
    elif whole != part:
        yield path


def ask(board: dict[str, Any], folder: Path, stack: ExitStack) -> list[str]:
    """Train, kill a rank, and ask all queries of the dashboard; returns those without an answer."""
    prometheus = watch(folder, stack)
    perdure = [sys.executable, "-m", "trainer.cli"]
    prepare = [*perdure, "data", "prepare", "stdlib", "--tokenizer", "bytes", "--out", "data"]
    subprocess.run(prepare, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    command = ["-m", "trainer", "recipe.yaml"]
    metrics = folder / "run" / "metrics.jsonl"
    with LocalNodes(
        command, folder=folder, nnodes="1", logs=folder, ranks=2,
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        wait_for(node, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 30)
        before = query(prometheus, "perdure_failures_total")
        os.kill(node.trainers()[1], signal.SIGKILL)
        wait_for(node, lambda: (query(prometheus, "perdure_failures_total") or 0) > (before or 0))
        wait_for(node, lambda: query(prometheus, "perdure_validation_loss") is not None)
        time.sleep(3)
        annotation = board["annotations"]["list"][0]["expr"]
        asked = {annotation: "Failures"}
        for panel in board["panels"]:
            asked |= {target["expr"]: panel["title"] for target in panel["targets"]}
        unanswered = []
        for expression, title in asked.items():
            value = query(prometheus, expression.replace("$run", ".*"))
            print(f"{title:20} {value if value is not None else '-':<20} {expression}")
            if value is None and expression.partition("{")[0] not in ABSENT:
                unanswered.append(expression)
    return unanswered


def watch(folder: Path, stack: ExitStack) -> str:
    """Start a node exporter and a Prometheus on loopback; returns the address of the latter."""
    (folder / "exported").mkdir()
    exporter, prometheus = (f"127.0.0.1:{free_port()}" for _ in range(2))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: node, static_configs: [{{targets: ['{exporter}']}}]}}]\n",
        encoding="utf-8",
    )
    commands = [
        [
            "prometheus-node-exporter",
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={folder / 'exported'}",
            f"--web.listen-address={exporter}",
        ],
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'series'}",
            f"--web.listen-address={prometheus}",
        ],
    ]
    for command in commands:
        if not shutil.which(command[0]):
            sys.exit(
                f"{command[0]} is missing; apt-get install prometheus prometheus-node-exporter"
            )
        log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
    return prometheus


def query(prometheus: str, expression: str) -> float | None:
    """The newest value of an expression; None if there is none, or no answer yet.

    Raises:
        HTTPError: Prometheus refuses the expression.
    """
    words = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://{prometheus}/api/v1/query?{words}", timeout=5) as page:
            found = json.load(page)["data"]["result"]
    except urllib.error.HTTPError:
        raise
    except OSError:
        return None
    return float(found[0]["value"][1]) if found else None


def wait_for(node: Any, true: Any) -> None:
    """Wait until a condition holds, while the run goes on."""
    deadline = time.monotonic() + 300
    while not true():
        if node.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run has ended, or waits in vain:\n{node.text()[-2000:]}")
        time.sleep(0.2)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
