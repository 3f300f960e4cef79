"""W&B and TensorBoard see every record once, and can neither end a run nor slow it down."""

import itertools
import json
import os
import runpy
import signal
import sqlite3
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support import json_lines, python_path
from benchmarks.support.wandb_files import not_in_wandb, wandb_rows
from elastic import Ledger, StartLine
from elastic.node.companion import NodeCompanion, end_companions
from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import RECIPE, ROOT, Forked, losses, soak
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.sections import TrackingSection
from trainer.run.metrics import RunLog, wandb_note
from trainer.run.sinks import wandb_mode
from trainer.run.trackers import RunMetricsTail, to_sink
from trainer.tools.generate import generate
from trainer.tools.report.report import read_metrics

TRACKED = ["tracking.tensorboard=true", "tracking.wandb=offline"]
OWN = ["tracking.sinks=[own_sink:sink]", "tracking.hooks=[own_hook:tell]"]


def points(run):
    """Steps of the training loss in TensorBoard, without those that were done again. The recipe is
    there, too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import PLUGIN_NAME

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert board.PluginTagToContent("text").keys() == {"recipe"}
    (text,) = board.Tensors("recipe")[-1].tensor_proto.string_val
    assert b"    optimizer:" in text
    assert board.PluginTagToContent(PLUGIN_NAME)
    assert "run/goodput" in board.Tags()["scalars"]
    return [point.step for point in board.Scalars("training/loss")]


def attempt_of(run_dir, start, parent=""):
    """Name of a new attempt that goes on from step `start` of `parent`."""
    begin = StartLine(step=start, sequences=0, global_batch=8, world_size=1, parent=parent)
    with Ledger(run_dir / "ledger.jsonl", begin):
        return begin.attempt


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans()), max_size=6))
def test_records_follow_the_lineage_of_the_newest_attempt(tmp_path_factory, attempts):
    """Attempts that go on from any earlier one, as after a partition, for so many steps, after some
    of which a new tracker goes on; and rank 0 of the first was cut off and goes on beside them."""
    run = tmp_path_factory.mktemp("run")
    tail, moment, seen, lines = RunMetricsTail(run, 0.0), 0.0, {}, [("", {0: 0.0})]
    for number, (earlier, steps, killed) in enumerate(attempts):
        parent, past = lines[earlier % len(lines)]
        begin = max(0, max(past) - 2)
        name = attempt_of(run, begin, parent)
        line = {step: at for step, at in past.items() if step <= begin}
        for step in range(begin + 1, begin + steps + 1):
            late = [(lines[1][0], 90 + step)] if number else []
            for writer, done in [(name, step), *late]:
                moment += 1.0
                with (run / "metrics.jsonl").open("a") as file:
                    record = {"step": done, "time": moment, "attempt": writer}
                    file.write(json.dumps(record) + "\n")
                line |= {done: moment} if writer == name else {}
            void, records = tail.read()
            seen = {done: at for done, at in seen.items() if void is None or done < void}
            seen |= {record["step"]: record["time"] for record in records}
            assert {0: 0.0, **seen} == line
        assert [one["step"] for one in read_metrics(run)] == sorted(line)[1:]
        lines.append((name, line))
        tail = RunMetricsTail(run, tail.after) if killed else tail


def test_a_record_is_newer_than_those_before_also_by_a_clock_that_is_behind(tmp_path):
    path, later = tmp_path / "metrics.jsonl", time.time() + 3600
    path.write_text("".join(f'{{"step": {n}, "time": {later + n}}}\n' for n in (1, 2, 3)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), [f"run.dir={tmp_path}"])
    tail = RunMetricsTail(tmp_path, 0.0)
    assert len(tail.read()[1]) == 3
    start = StartLine(step=1, sequences=8, global_batch=8, world_size=1)
    with RunLog(recipe, start, silent=False) as log:
        log.record(2, {"loss": 1.0})
        log.record(2, {"validation_loss": 2.0})
    assert [record["step"] for record in tail.read()[1]] == [2, 2]
    (tmp_path / "new").write_text(f'{{"step": 3, "time": {later + 9}}}\n')
    (tmp_path / "new").replace(path)  # as rank 0 replaces a file of another user
    assert [record["step"] for record in tail.read()[1]] == [3]


def test_a_sink_is_told_what_counts_no_more(tmp_path):
    """The sink of docs/extending.md: steps 2 and 3 come again, and a new process goes on."""
    path, sink = tmp_path / "metrics.jsonl", runpy.run_path(ROOT / "examples/own_sink.py")["sink"]
    line = '{{"step": {}, "time": {}, "loss": {}, "attempt": "{}"}}\n'
    first = attempt_of(tmp_path, 0)
    path.write_text("".join(line.format(n, n, "null", first) for n in (1, 2, 3)))
    with closing(sink(tmp_path).database) as database:
        turns = to_sink(sink(tmp_path), tmp_path, 0.0)
        assert next(turns) == 3.0
        with path.open("a") as file:
            file.write(line.format(2, 4, 0.5, attempt_of(tmp_path, 1, first)))
        assert next(turns) == next(to_sink(sink(tmp_path), tmp_path, 4.0)) == 4.0
        query = "SELECT step, value FROM metrics WHERE name = 'loss'"
        assert database.execute(query).fetchall() == [(1, None), (2, 0.5)]


def test_the_environment_says_how_wandb_runs(monkeypatch):
    modes = {"": "online", "run": "online", "dryrun": "offline", "disabled": "disabled"}
    for word, mode in modes.items():
        monkeypatch.setenv("WANDB_MODE", word)
        assert wandb_mode("online") == mode
        note = wandb_note(TrackingSection(wandb="online"))
        assert (f"W&B is {mode}: WANDB_MODE={word}" in note) == (mode != "online")
        assert not wandb_note(TrackingSection())
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(RecipeError, match="WANDB_MODE=of in the environment: none of online, run"):
        wandb_mode("offline")


def test_a_tracker_that_fails_costs_a_run_nothing(start, workspace, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        "from types import SimpleNamespace as Settings\n"
        "class init:\n"
        " def log(self, *_, **__): 1 / 0\n"
        " def __init__(self, **_): self.settings = Settings(sync_file='wandb/run/file')\n"
        " define_metric, starting_step = lambda *_, **__: None, 0\n"
    )
    (tmp_path / "torn.py").write_text(
        "class Torn:\n def record(self, step, values): exit(1)\n close = print\n"
        "def sink(run_dir): return Torn()\n"
        "def not_one(run_dir): return {}\n"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, ROOT / "examples", ROOT))
    monkeypatch.delenv("CHAT_URL", raising=False)
    own = ["tracking.sinks=[torn:sink, torn:not_one]", OWN[1]]
    code, output = start(1, "run.dir=tracked", "run.steps=9", *TRACKED, *own).wait()
    assert code == 0, output
    told = [line for line in output.splitlines() if line.startswith("warning")]
    assert sorted(line.replace(str(workspace), "") for line in told) == [
        f"warning: W&B fails at {tmp_path}/wandb.py:3: ZeroDivisionError: division by zero; "
        "training continues; /tracked/metrics.jsonl has all data",
        f"warning: tracking.hooks: own_hook:tell, called with Start of step 0, fails at "
        f"{ROOT}/examples/own_hook.py:27: KeyError: 'CHAT_URL'; training continues",
        "warning: tracking.sinks: torn:not_one returned dict, which has no record and no close; "
        "training continues; /tracked/metrics.jsonl has all data",
        f"warning: tracking.sinks: torn:sink fails at {tmp_path}/torn.py:2: SystemExit: 1; "
        "training continues; /tracked/metrics.jsonl has all data",
    ]
    assert points(workspace / "tracked") == list(range(1, 10))


def test_a_companion_that_hangs_is_not_waited_for(tmp_path, monkeypatch, caplog):
    (tmp_path / "hangs.py").write_text("open('runs', 'w')\nimport time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "here/elastic").mkdir(parents=True)  # in the working directory
    (tmp_path / "here/elastic/__init__.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    companion, started = NodeCompanion(["hangs"]), time.monotonic()
    while not Path("runs").exists():
        assert companion.lives
        time.sleep(0.01)
    end_companions([companion], 0.2)
    assert not companion.lives
    assert time.monotonic() - started < 5
    assert "hangs did not end in time" in caplog.text


@contextmanager
def chat():
    """Yields its URL, and what was posted so far."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", posted
        finally:
            server.shutdown()
            thread.join()


def test_trackers_survive_the_ranks(workspace, tmp_path):
    """With the sink and the hook of docs/extending.md."""
    prom = tmp_path / "run.prom"
    recipe = ["run.dir=tracked-on", "run.steps=24", "elastic.snapshot_every=1", *TRACKED, *OWN]
    recipe += ["run.evaluate_every=12", f"tracking.prometheus={prom}"]
    recipe += ["run.samples=[the b, '']", "checkpoint.every=8"]
    alerts = [{"when": "failure", "run": f'echo "$PERDURE_ALERT" > {tmp_path}/told'}]
    recipe += [f"tracking.alerts={json.dumps(alerts)}"]
    with chat() as (url, posted), LocalNodes(
        ["-m", "trainer", "recipe.yaml", *recipe],
        folder=workspace,
        nnodes="1",
        logs=tmp_path, start=Forked,
        environment={
            "PYTHONPATH": python_path(ROOT, workspace, ROOT / "examples"), "CHAT_URL": url,
        },
    ) as nodes:  # fmt: skip
        node, run = nodes.add(), workspace / "tracked-on"
        deadline = time.monotonic() + 60

        def companions():
            return node.running("trainer.run.trackers") + node.running("trainer.tools.run_samples")

        # One may be forking an alert's command just now, which looks like itself.
        while max(losses(workspace, run.name), default=0) < 3 or len(before := companions()) != 7:
            assert time.monotonic() < deadline, node.text()
            time.sleep(0.01)
        os.kill(node.trainers()[0], signal.SIGKILL)
        while len(read_history(run).attempts) < 2:
            assert time.monotonic() < deadline, node.text()
            time.sleep(0.01)
        assert {*before} <= {*companions()}
        while not read_history(run).attempts[1].steps:
            assert time.monotonic() < deadline, node.text()
            time.sleep(0.01)
        os.kill(before[-1], signal.SIGKILL)
        assert nodes.wait(60) == [0], node.text()
    (line,) = (line for line in node.text().splitlines() if "run_samples" in line)
    assert line.endswith("24 ended with exit code -9; what it had not done is lost")
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert points(run) == list(range(1, 25))
    assert not_in_wandb(run) == []
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]

    with closing(sqlite3.connect(run / "metrics.sqlite")) as database:
        rows = database.execute("SELECT step, value FROM metrics WHERE name = 'loss'").fetchall()
    assert dict(rows) == losses(workspace, run.name)
    assert len(rows) == 24
    again = read_history(run).attempts[1].start
    assert posted[0] == "training begins on 1 rank(s)"
    assert posted[1].startswith(f"going on after step {again.step}, ")
    assert "rank 0" in posted[1]
    # On a busy machine the rank is killed while it saves step 8.
    later = [text.split(":")[0] for text in posted[2:] if "no checkpoint of step 8" not in text]
    assert later == ["step 12", "step 24", "ended after step 24"]
    found = dict(line.split(" ") for line in prom.read_text().splitlines() if line[0] != "#")
    assert found['perdure_step{run="tracked-on"}'] == "24"
    loss = float(found['perdure_loss{run="tracked-on"}'])
    assert loss == losses(workspace, run.name)[24]
    assert 'perdure_validation_loss{run="tracked-on"}' in found
    assert found['perdure_failures_total{run="tracked-on"}'] == "1"
    assert 0 < float(found['perdure_goodput{run="tracked-on"}']) < 1
    assert "# TYPE perdure_failures_total counter" in prom.read_text()
    assert "1 failure(s) by now" in (tmp_path / "told").read_text()
    assert list(tmp_path.glob("run.prom*")) == [prom]

    # Its successor makes up for what is missing, the newest checkpoint first.
    (run / "samples.jsonl").unlink(missing_ok=True)
    words = ["trainer.tools.run_samples", str(run), "24"]
    successor = Forked(
        words, tmp_path, {**os.environ}, tmp_path / "successor.log"
    )  # its input is over
    assert successor.wait(300) == 0
    samples = json_lines(run / "samples.jsonl")
    there = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    sampled = [there[-1]] * 2 + ["step-00000016"] * 2 * ("step-00000016" in there)
    assert [line["checkpoint"] for line in samples] == sampled
    assert [(line["step"], line["prompt"]) for line in samples[:2]] == [(24, "the b"), (24, "")]
    assert all(set(line) == {"step", "prompt", "text", "time", "checkpoint"} for line in samples)
    text = "".join(generate(run / "checkpoints" / there[-1], "the b"))
    assert samples[0]["text"] == text != ""


def test_a_tracker_that_is_killed_is_told_of(tmp_path, caplog):
    companion = NodeCompanion(["trainer.run.trackers", str(tmp_path), "hooks", "os:kill"])
    companion._process.kill()
    end_companions([companion], 30)
    assert "hooks os:kill ended with exit code -9; what it had not done is lost" in caplog.text


@soak
def test_wandb_has_every_record_whatever_is_killed(tmp_path, monkeypatch):
    """A node in the midst of it, then wandb-core alone; steps are done again."""
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    (tmp_path / "recipe.yaml").write_text("tracking: {wandb: online, project: p, name: null}")
    metrics, moments = tmp_path / "metrics.jsonl", itertools.count(1.8e9, 0.001)
    attempts = [attempt_of(tmp_path, 0)]

    def steps(*numbers):
        with metrics.open("a") as file:
            for step in numbers:
                for values in {"loss": 1 / step}, {"saved": 2 / step}, {"saved": 3 / step}:
                    about = {"step": step, "time": next(moments), "attempt": attempts[-1]}
                    file.write(json.dumps({**about, **values}) + "\n")

    def tracker(written):
        companion = NodeCompanion(["trainer.run.trackers", str(tmp_path), "wandb"])
        deadline = time.monotonic() + 60
        while not (len(files := wandb_rows(tmp_path)) == written and files[-1]):
            assert companion.lives
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = [companion._process.pid]
        for file in Path(f"/proc/{family[0]}/task").glob("*/children"):
            family += map(int, file.read_text().split())
        return companion, family

    steps(*range(1, 400))  # more than a block
    companion, family = tracker(1)
    steps(400, 401)
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    end_companions([companion], 30)
    killed = next((tmp_path / "wandb").glob("*run-*/*.wandb"))
    with killed.open("ab") as file:
        file.write(b"torn")
    attempts.append(attempt_of(tmp_path, 395, attempts[0]))
    steps(396, 397, 402)
    companion, family = tracker(2)
    steps(403)
    os.kill(family[1], signal.SIGKILL)
    steps(404, 405)
    end_companions([companion], 30)
    assert not_in_wandb(tmp_path) == []
    assert not killed.read_bytes().endswith(b"torn")  # `wandb sync` would stop there
    files = wandb_rows(tmp_path)
    assert len(files) == 3
    assert [row["step"] for rows in files for row in rows][-4:] == [404, 404, 405, 405]
    assert [file.name[:7] for file in (tmp_path / "wandb").glob("*run-*")] == ["offline"] * 3
