"""Runs whose nodes share nothing but a bucket: no line of a committed step is lost, one launch at a
time trains, and the weights are those of a run on a local disk."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import pytest

from benchmarks.support import python_path
from checkpointing.errors import StorageError
from checkpointing.storage import object_storage, s3
from checkpointing.storage.folders import collect_memory, memory_folders
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.ownership import owner
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.s3 import S3
from elastic import Pulse
from elastic.node.files import write_whole
from elastic.node.occupancy import NodeDirectoryOccupiedError
from elastic.record.history import read_history
from elastic.record.ledger import Ledger, StartLine
from elastic.world import ROUND
from lab.container import network_possible
from lab.local_nodes import LocalNodes, free_port, start_python
from tests.checkpointing.faults import until
from tests.checkpointing.storage.test_objects import fork
from tests.distributed.jobs import ROOT, SOAK, soak
from tests.s3 import access
from tests.trainer.run.test_data_changes import answer
from trainer.cli.main import parse
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.data_change import RecipeDataChange, plain
from trainer.run import shipping, terms
from trainer.run.parts import (
    RunPartRange,
    RunPartsReader,
    RunRecordCopy,
    by_file,
    parts_of,
    stored_until,
)
from trainer.run.preflight import check_launch
from trainer.run.shipping import TAIL, RunShipper
from trainer.run.terms import RunTermHolder, claim, holder_of, newest_term
from trainer.tools.doctor import buckets
from trainer.tools.mirror import local_runs
from trainer.tools.report.report import read_metrics
from trainer.tools.run_samples import continue_prompts
from trainer.tools.seeing.metric_columns import read_samples

SAVED = ("run.steps=4", "schedule.warmup_steps=1", "run.log_every=1")
SAVED += ("checkpoint.every=2", "checkpoint.when_busy=wait")


@pytest.fixture
def run(store, request):
    """A folder of a bucket in which no run has begun."""
    return ObjectPath.of(f"s3://bucket/{request.node.name}/run")


def perdure(*words: str) -> int:
    """Exit code of a command."""
    arguments = parse(words)
    return arguments.run(arguments)


@pytest.mark.timeout(240)
def test_a_machine_that_is_lost_takes_no_line_of_a_committed_step_along(
    store, run, workspace, start, tmp_path, monkeypatch, capsys
):
    def at_the_commit(method, path):
        if method == "DELETE" and "step-00000002.tmp" in path:  # index.json is there
            os.kill(job.ranks[0].pid, signal.SIGKILL)

    def forgotten():
        collect_memory(f"{run}/checkpoints")
        return not any(memory_folders(f"{run}/checkpoints"))

    monkeypatch.chdir(workspace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    recipe = load_recipe("recipe.yaml", [f"run.dir={run}"])
    recipe.directory.mkdir(parents=True)
    with monkeypatch.context() as supervised:
        supervised.setenv(ROUND, "1")
        change = plain([RecipeDataChange(name="x", begin=16, weights={"data": 1.0})])
        assert "refused" not in answer(recipe, Pulse.from_environment(), change[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "lost"))
    store.fault = at_the_commit
    job = start(1, f"run.dir={run}", *SAVED)
    code, output = job.wait()
    assert code == -signal.SIGKILL, output
    assert "data: 2 stages, from sequences 0, 16; " in output  # accepted on the first machine
    shutil.rmtree(tmp_path / "lost")
    ledger, _ = by_file(RunPartsReader(run).lines())
    steps = [json.loads(line)["step"] for line in ledger if line.startswith(b'{"kind":"step"')]
    assert steps[:2] == [1, 2]
    if SOAK:
        assert until(forgotten, 10), "processes of the job are left"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
        code, output = start(1, f"run.dir={run}", *SAVED).wait()
        assert code == 0, output
        assert "resuming after step 2 of 4 from storage" in output
        shutil.rmtree(tmp_path / "new")

        for words in (("--audit", "9"), ("--step", "3", "--why")):
            before = dict(store_of(run).walk(run))
            assert perdure("replay", str(run), *words, "--nproc", "1") == 0
            assert dict(store_of(run).walk(run)) == before
    assert perdure("report", str(run), "--check") == 0, capsys.readouterr()
    assert perdure("watch", str(run), "--once") == 0
    assert perdure("runs", str(run.parent)) == 0
    assert perdure("ckpt", "show", str(run)) == 0
    assert perdure("generate", str(run), "--prompt", "a", "--max-new-tokens", "2") == 0
    told = capsys.readouterr().out
    assert "every sequence exactly once" in told
    assert_sampled(run, tmp_path / "copy")
    assert "holds no run" not in told
    assert not (workspace / "s3:").exists()


def assert_sampled(run, directory):
    """The companion of a rank 0 continues prompts from a checkpoint in the bucket."""
    directory.mkdir()
    RunRecordCopy(run, directory).refresh()
    kept = directory / "recipe.yaml"
    text = kept.read_text()
    assert "  samples: []\n" in text
    kept.write_text(text.replace("  samples: []\n", "  samples: [a b]\n"))
    companion = continue_prompts(directory, 2, threading.Event(), 0.0)
    assert [next(companion), next(companion)] == [1.0, 1.0]
    with local_runs([run]) as (copy,):
        (samples,) = read_samples(copy.directory)
    assert samples["step"] in (2, 4)
    assert [prompt for prompt, _ in samples["pairs"]] == ["a b"]


def test_a_stale_list_ends_in_a_claim(run, monkeypatch):
    """Not in asking for the same term for ever."""
    claim(run, "a", owner()).release()
    monkeypatch.setattr(terms, "newest_term", lambda run: 0)
    second = claim(run, "a", owner())
    assert second.number == 2
    second.release()


def test_parts_that_no_run_has_written_hide_nothing(run, tmp_path, monkeypatch):
    """And clocks that differ from the store's say nothing of what is new."""
    store, line = store_of(run), '{"step": %d, "time": 9}'
    for first in (0, 1):
        store.write(run / "lines" / "000001" / f"{first:09}-{first + 1:09}", b"%d\n" % first)
    forged = "000000000-999999999", "000000000-000000003", "000000002-000000001"
    for name in (*forged, "0000000002-0000000003"):
        store.write(run / "lines" / "000001" / name, b"forged\n")
    assert RunPartsReader(run).lines() == [b"0\n", b"1\n"]
    copy, ahead = RunRecordCopy(run, tmp_path), time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    copy.refresh()
    old = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert ahead - 60 < old <= ahead  # the store says how old these are
    ahead += 100
    copy.refresh()
    assert (tmp_path / "metrics.jsonl").stat().st_mtime == old
    time.sleep(1)  # the store counts whole seconds
    store.write(run / "lines" / "000001" / "000000002-000000003", f"{line % 1}\n".encode())
    copy.refresh()
    assert abs((tmp_path / "metrics.jsonl").stat().st_mtime - ahead) < 1


def test_one_launch_at_a_time_trains(run, monkeypatch, caplog):
    monkeypatch.setattr(terms, "BEAT_SECONDS", 0.05)
    first = claim(run, "a", owner())
    with pytest.raises(
        NodeDirectoryOccupiedError, match=r"process \d+ on .* trains there; end it first"
    ):
        claim(run, "b", "")  # the process of the first lives, on this machine
    second = claim(run, "a", owner())  # as in the next round of a job whose first node was lost
    assert (second.number, second.before) == (2, holder_of(run, 1))
    first.stop()
    second.release()
    assert claim(run, "b", owner()).number == 3

    store = store_of(run)

    def claimed(number, owner, launcher):
        """As another process does."""
        holder = RunTermHolder("c", owner, launcher, 0.0, "0" * 16)
        store.write(run / "terms" / f"{number:06}", json.dumps(asdict(holder)).encode())

    def watches_first():
        """Whether a launch takes over only after it has watched the last one."""
        caplog.clear()
        began = time.monotonic()
        claim(run, "b", owner()).release()
        watched = "whether it still does" in caplog.text
        assert not watched or time.monotonic() - began > terms.MISSED_BEATS * terms.BEAT_SECONDS
        return watched

    ended = subprocess.Popen(["sleep", "60"])
    gone = owner(ended.pid)
    ended.kill()
    ended.wait()
    claimed(4, gone, owner())  # its agent lives, and starts rank 0 again
    with pytest.raises(NodeDirectoryOccupiedError, match=f"process {ended.pid} on "):
        claim(run, "b", owner())
    claimed(4, gone, gone)
    assert not watches_first()
    claimed(6, gone, "")  # its other nodes may live
    assert watches_first()

    # Of a process on another machine nothing is known but its beat.
    claimed(8, "far-0123abcd-1-2", "far-0123abcd-1-2")
    beating = threading.Event()

    def beat():
        for count in range(1000):
            if beating.wait(0.02):
                return
            store.write(run / "beats" / "000008", b"%d" % count)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    with monkeypatch.context() as patient:
        patient.setattr(terms, "BEAT_SECONDS", 1.0)
        with pytest.raises(NodeDirectoryOccupiedError, match="process 1 on far, since"):
            claim(run, "b", owner())
    beating.set()
    thread.join()
    assert watches_first()


def test_a_bucket_that_cannot_be_used_is_told_in_a_line(store, run, workspace, monkeypatch, caplog):
    """Before the launch, also where checkpoints are on a disk."""
    monkeypatch.chdir(workspace)

    def refusal(where=run):
        local = ["checkpoint.directory=elsewhere", "run.device=cpu"]
        with pytest.raises((RecipeError, StorageError)) as refused:
            check_launch(load_recipe("recipe.yaml", [f"run.dir={where}", *local]), 1, 1)
        (line,) = str(refused.value).splitlines()
        return line

    given = [f"run.dir={run}", "checkpoint.directory=s3://nowhere/run"]
    fine, wrong = buckets(load_recipe("recipe.yaml", given))
    assert (fine.name, fine.state, wrong.state) == ("run.dir", "ok", "WRONG")
    assert "has no bucket 'nowhere'; create it, or correct the URL" in wrong.what
    line = refusal("s3://nowhere/run")
    assert re.fullmatch(r"s3://nowhere/run/terms: .* has no bucket 'nowhere'; create it, .*", line)
    store.fault = lambda method, path: "403 InvalidAccessKeyId"
    assert "gives no access (InvalidAccessKeyId); check AWS_ACCESS_KEY_ID and" in refusal()
    store.fault = lambda method, path: "403 AccessDenied" if method == "PUT" else None
    with pytest.raises(StorageError, match=r"no access \(AccessDenied\); .* also write and delete"):
        claim(run, "a", "")  # it may read: nothing less than a write shows it
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    object_storage._store.cache_clear()
    caplog.set_level(logging.INFO)
    assert "2 requests to " in (line := refusal())
    assert line.endswith("check AWS_ENDPOINT_URL and the network, or try later")
    assert caplog.text.count("Could not connect") == 1  # it was tried again
    object_storage._store.cache_clear()


def test_a_store_that_obeys_no_conditions_is_refused(run, monkeypatch):
    monkeypatch.setattr(S3, "write_new", S3.write)
    with pytest.raises(StorageError, match=r"its store ignores the condition .*If-None-Match"):
        claim(run, "a", "")


def lines_of(run):
    return [line.decode().rstrip("\n") for line in RunPartsReader(run).lines()]


def test_lines_are_stored_once_whoever_stores_them(run, tmp_path, monkeypatch):
    """By rank 0, by whoever commits, by who loads a state, by the next process of a machine."""
    monkeypatch.setattr(RunShipper, "_ship", lambda self: None)  # the thread
    monkeypatch.setattr(shipping, "MERGED", 3)
    written = []

    def write(shipper, count):
        for _ in range(count):
            written.append(json.dumps({"kind": "event", "number": len(written)}))
            shipper.add(written[-1])

    lost = RunShipper(run, tmp_path / "lost", "job", owner())
    for count in range(1, 11):
        write(lost, 1)
        for url, data in lost.before_commit().items() if count % 2 else ():
            store_of(run).write_new(ObjectPath.of(url), data)
        write(lost, count - 1)
        lost.flush()
    assert parts_of(run, 1)[0] == (0, 45)  # 9 parts became 3, and these 1
    assert len(parts_of(run, 1)) == 2
    assert lines_of(run) == written

    write(lost, 3)
    state = json.loads(json.dumps(lost.to_state()))
    write(lost, 2)  # gone with the machine
    del written[-2:]
    with RunShipper(run, tmp_path / "next", "job", owner()) as following:
        following.take(state)
        following.take({TAIL: {"term": 1, "first": 0, "lines": ["a\nb"]}})  # of no run
        assert lines_of(run) == written
        write(following, 1)
        following.flush()
        write(following, 2)
        killed = following.tail
    monkeypatch.undo()
    assert killed == RunPartRange(2, 1, written[-2:])
    RunShipper(run, tmp_path / "next", "job", owner()).__exit__(None, None, None)
    assert lines_of(run) == written
    assert not list((tmp_path / "next/journal").iterdir())


def test_a_damaged_part_hides_no_line_that_a_machine_has(run, tmp_path, monkeypatch):
    monkeypatch.setattr(RunShipper, "_ship", lambda self: None)  # the thread
    store, reader = store_of(run), RunPartsReader(run)
    written = [json.dumps({"kind": "event", "number": number}) for number in range(6)]
    with RunShipper(run, tmp_path, "job", owner()) as unsent:
        for line in written:
            unsent.add(line)
        store.write(run / unsent.tail.name, b"half of\n")
        store.write(run / RunPartRange(1, 2, [""] * 7).name, b"half of\n")
    assert reader.lines() == []
    RunShipper(run, tmp_path, "job", owner()).__exit__(None, None, None)
    assert lines_of(run) == written
    assert b"".join(reader.lines()).decode().splitlines() == written


@pytest.mark.parametrize("damage", [b"half of\n", None])
def test_damaged_parts_are_not_merged(run, tmp_path, monkeypatch, caplog, damage):
    """Of three parts, one is damaged or missing: the next start stores its lines again."""
    monkeypatch.setattr(RunShipper, "_ship", lambda self: None)  # the thread
    monkeypatch.setattr(shipping, "MERGED", 3)
    store, damaged = store_of(run), run / RunPartRange(1, 2, ["", ""]).name
    written = [json.dumps({"kind": "event", "number": number}) for number in range(10)]
    with RunShipper(run, tmp_path, "job", owner()) as shipper:
        for number, line in enumerate(written):
            shipper.add(line)
            if number % 2:
                shipper.flush()
            if number == 3:
                store.delete([damaged])
            if number == 3 and damage:
                store.write(damaged, damage)
        left = [(begin, begin + 2) for begin in (0, 2, 4, 6, 8) if damage or begin != 2]
        assert parts_of(run, 1) == left
        assert not damage or store.read(damaged) == damage
    assert caplog.text.count("does not hold its lines") == 1
    RunShipper(run, tmp_path, "job", owner()).__exit__(None, None, None)
    assert lines_of(run) == written


def test_records_of_steps_that_are_done_again_are_left_out(run, tmp_path):
    """As those of a run in a directory, and however a copy came to be. The last attempt goes on
    from step 6 of the first, as after a partition."""
    copy, names = RunRecordCopy(run, tmp_path), [""]
    for attempt, (parent, first, last) in enumerate([(0, 0, 7), (1, 5, 9), (1, 6, 8)]):
        shipper = RunShipper(run, tmp_path / "local", "job", owner())
        begin = StartLine(
            step=first, sequences=8 * first, global_batch=8, world_size=1, parent=names[parent]
        )
        names.append(begin.attempt)
        ledger = Ledger(tmp_path / f"{attempt}.jsonl", begin, also=shipper.add)
        for step in range(first + 1, last + 1):
            ledger.step(step, 8 * step - 8, 8 * step, 0.1)
            record = {"step": step, "time": 1.0, "attempt": begin.attempt, "number": attempt}
            shipper.add(json.dumps(record))
        shipper.flush()
        shipper.__exit__(None, None, None)
        copy.refresh()
    ledger, records = by_file(RunPartsReader(run).lines())
    assert len(ledger) == 3 + 7 + 4 + 2
    assert [json.loads(line)["number"] for line in records] == [0] * 7 + [1] * 4 + [2] * 2
    counted = [(record["step"], record["number"]) for record in read_metrics(tmp_path)]
    assert counted == [*((step, 0) for step in range(1, 7)), (7, 2), (8, 2)]
    assert (tmp_path / "ledger.jsonl").read_bytes() == b"".join(ledger)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(records)


def write_until_killed(run, disk, copies):
    """What rank 0 does with the record of a run, without a model: a step takes 2 ms, every 7th is
    copied to memory, every 25th is committed."""
    shipping.SHIP_SECONDS, shipping.MERGED = 0.05, 4
    logging.disable()
    store = store_of(run)
    saves = [place.name for place in store.children(run / "saves")]
    states = [json.loads(copy.read_text()) for copy in copies if copy.exists()]
    states += [json.loads(store.read(run / "saves" / name)) for name in saves]
    state = max(states, key=lambda one: one["step"], default={"step": 0, "attempt": ""})
    shipper, first = RunShipper(run, disk, "job", owner()), state["step"]
    shipper.take(state)
    begin = StartLine(
        step=first, sequences=8 * first, global_batch=8, world_size=2, parent=state["attempt"]
    )
    ledger = Ledger(disk / "ledger.jsonl", begin, also=shipper.add)
    for step in range(first + 1, 100_000):
        time.sleep(0.002)
        ledger.step(step, 8 * step - 8, 8 * step, 0.002)
        shipper.add(json.dumps({"step": step, "time": float(step)}))
        kept = json.dumps({"step": step, "attempt": begin.attempt, **shipper.to_state()})
        for copy in copies if step % 7 == 0 else ():
            write_whole(copy, kept)
        if step % 25 == 0:
            for url, data in shipper.before_commit().items():
                store.write_new(ObjectPath.of(url), data)
            store.write_new(run / "saves" / f"{step:08}-{begin.attempt}", kept.encode())
        (disk / "reached").write_text(str(step - first))


@soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_writers_that_are_killed_lose_no_line_of_a_committed_step(store, run, tmp_path, seed):
    """Whatever dies with them, and while others go on beside the next. Of all requests to the store
    a fifth fails, before or after it was done."""
    draw, fates = random.Random(seed), []
    run = run / str(seed)
    kinds = {"503 SlowDown": 0.1, "reset": 0.15, "cut": 0.2}

    def fault(method, path):
        luck = draw.random()
        return next((kind for kind, most in kinds.items() if luck < most), None)

    store.fault = fault
    mine, peer, beside = tmp_path / "mine", tmp_path / "peer", None
    disk = tmp_path / "disk-0"
    for number in range(int(os.environ.get("BUCKET_KILLS", "40"))):
        writer = fork(partial(write_until_killed, run, disk, (mine, peer)))
        wanted, reached = draw.randrange(5, 60), disk / "reached"
        far_enough = partial(has_reached, reached, wanted)
        assert until(far_enough, 240), f"a writer did not get on: {fates}"
        if beside:
            kill(beside)
            beside = None
        fates.append(draw.choice(["process", "node", "node", "all", "partition"]))
        if fates[-1] == "partition":
            beside = writer
        else:
            kill(writer)
        reached.unlink(missing_ok=True)
        if fates[-1] != "process":
            disk = tmp_path / f"disk-{number + 1}"
            mine.unlink(missing_ok=True)
        if fates[-1] == "all":
            peer.unlink(missing_ok=True)
    if beside:
        kill(beside)
    store.fault = lambda method, path: None
    saves = [int(place.name[:8]) for place in store_of(run).children(run / "saves")]
    copy = tmp_path / "copy"
    copy.mkdir()
    assert RunRecordCopy(run, copy).refresh()
    history = read_history(copy)
    print({fate: fates.count(fate) for fate in fates}, len(history.attempts), max(saves))
    assert not history.problems
    assert not history.unrecorded
    done = {step.step for attempt in history.attempts for step in attempt.steps}
    assert done >= {*range(1, max(saves) + 1)}
    for term in range(1, newest_term(run) + 1):
        parts = parts_of(run, term)
        assert stored_until(run, term, 0) == max((after for _, after in parts), default=0)


def has_reached(file, steps):
    return file.exists() and int(file.read_text() or 0) >= steps


def kill(writer):
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


# --- nodes that share nothing else ---------------------------------------------------------------

FAULTS, EVERY = int(os.environ.get("BUCKET_FAULTS", "50")), 20
"""Faults, and steps between two."""
KINDS = ("worker", "worker", "node of rank 0", "node", "all", "cut")
"""Of so many faults in a row each of these is one."""


@soak
@pytest.mark.timeout(7200)
def test_faults_on_nodes_that_share_nothing_but_a_bucket(workspace, tmp_path):
    """Each node has a network interface, shared memory and a disk of its own, which are lost with
    it. The store answers as `tests.s3.troubled` says."""
    if not network_possible():
        pytest.skip("takes root, ip and nft")
    seed, steps = int(os.environ.get("CHAOS_SEED", "1")), EVERY * (FAULTS + 1)
    draw, url = random.Random(seed), "s3://bucket/runs/troubled"
    shared = (f"run.steps={steps}", "run.determinism=exact", "run.log_every=1")
    saved = ("checkpoint.every=20", "elastic.snapshot_every=5", "checkpoint.slots=2")
    saved += ("checkpoint.peer_copy=true",)
    untroubled = ["trainer", "recipe.yaml", "run.dir=untroubled", *shared]
    subprocess.run([sys.executable, "-m", *untroubled], cwd=workspace, check=True)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of this test alone")
    environment = {
        "PYTHONPATH": python_path(ROOT, workspace),
        "PERDURE_SECRET_FILE": str(secret),
        "XDG_CACHE_HOME": "/dev/shm/cache",  # a node's own, as its memory is
    }
    with LocalNodes(
        ["recipe.yaml", f"run.dir={url}", *shared, *saved],
        folder=workspace,
        nnodes="1:3",
        logs=tmp_path,
        environment=environment,
        launcher=("trainer.cli", "train"),
        own_memory=True,
        own_network=True,
        start=start_python,
    ) as nodes:
        inside, log = nodes._network.inside, tmp_path / "s3.log"
        serving = start_python(
            [*inside, "tests.s3", f"{nodes.prefix}.1", str(seed)],
            workspace, {**os.environ, **environment}, log,
        )  # fmt: skip
        try:
            until(lambda: "port " in log.read_text() or serving.poll() is not None, 60)
            port = int(re.search(r"port (\d+)", log.read_text())[1])
            reach = access(f"{nodes.prefix}.1", port)
            nodes.environment = environment | reach
            lost, kinds = [], []
            for _ in range(3):
                nodes.add()
            for fault in range(FAULTS):
                wait_for_step(nodes, EVERY * (fault + 1))
                kinds = kinds or draw.sample(KINDS, len(KINDS))
                kind = kinds.pop()
                print(f"step {newest_step(nodes)}: {kind}", flush=True)
                lost += inject(kind, nodes, draw)
            deadline = time.monotonic() + 600
            while living(nodes):
                assert time.monotonic() < deadline, texts(nodes)
                time.sleep(0.1)
            ended = [node.process.returncode for node in nodes.nodes if node not in lost]
            assert set(ended) == {0}, texts(nodes)
            judge = [*inside, "tests.distributed.bucket_verdict", url, "untroubled", str(steps)]
            verdict = subprocess.run(
                [sys.executable, "-m", *judge],
                cwd=workspace, env={**os.environ, **environment, **reach},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            print(verdict.stdout)
            assert verdict.returncode == 0, verdict.stdout + verdict.stderr
        finally:
            serving.kill()
            serving.wait()


def living(nodes):
    return [node for node in nodes.nodes if node.process.poll() is None]


def newest_step(nodes):
    told = [node.progress(0) for node in living(nodes)]
    return max((one.step for one in told if one), default=0)


def texts(nodes):
    return "\n".join(f"--- {node.log}\n{node.text()[-3000:]}" for node in nodes.nodes[-4:])


def wait_for_step(nodes, step, seconds=900):
    deadline = time.monotonic() + seconds
    while newest_step(nodes) < step:
        assert living(nodes), texts(nodes)
        assert time.monotonic() < deadline, f"step {step} did not come\n{texts(nodes)}"
        time.sleep(0.05)


def inject(kind, nodes, draw):
    """Let a fault come, and replace the nodes that are lost by it; returns these."""
    up, lost = living(nodes), []
    if kind == "worker":
        workers = [pid for node in up for pid in node.trainers()]
        with suppress(ProcessLookupError):
            os.kill(draw.choice(workers), signal.SIGKILL)
    elif kind == "cut":
        node = draw.choice(up)
        node.container.cut()
        time.sleep(draw.uniform(0.5, 4.0))
        node.container.heal()
    else:
        lost = up if kind == "all" else [draw.choice(up)]
        if kind == "node of rank 0":
            lost = [max(up, key=last_line)]
        for node in lost:
            node.kill()
        for _ in lost:
            nodes.add()
    return lost


def last_line(node):
    """When a node last wrote a line of the ledger; 0 if it never did."""
    found = node.container.memory.glob("cache/perdure/runs/*/*/ledger.jsonl")
    return max((file.stat().st_mtime for file in found), default=0.0)


@soak
@pytest.mark.timeout(120)
def test_nodes_without_a_common_secret_are_told_so(workspace, tmp_path, run):
    given = ["-m", "trainer", "recipe.yaml", f"run.dir={run}"]
    environment = {"PYTHONPATH": python_path(ROOT, workspace)}
    with LocalNodes(
        given, folder=workspace, nnodes="1:2", logs=tmp_path, environment=environment
    ) as nodes:
        node = nodes.add()
        assert nodes.wait(100) == [2]
        errors = [line for line in node.text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, node.text()
        assert errors[0].startswith("error: nodes must share a secret: name a file")
