"""The driver of `benchmarks.gpu` on a machine without one: whatever becomes of a case, the others
are measured and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu import correct, machine, saves, speed, survives
from benchmarks.gpu.cases import CASES, SLICES, Bound, Case, chosen, judge, standings
from benchmarks.gpu.driver import State, code_digest, run_cases, source, write_json
from benchmarks.gpu.report import PAGE, page, read_results, slug, take_in
from benchmarks.gpu.setting import PARAMETERS, QWEN3, Setting, UnsupportedError, write_recipe
from benchmarks.gpu.setting import recipe as build_recipe
from benchmarks.gpu.sharded import units
from benchmarks.gpu.speed import sections_of
from benchmarks.gpu.synthetic import EOS, data_set
from benchmarks.gpu.wheels import OPTIONAL, modules
from benchmarks.peers import minimal_loop
from benchmarks.support import ROOT
from benchmarks.support.peer import Clock, Job
from tests.benchmarks.gpu_cases import MACHINE, case, plan
from tests.distributed.jobs import soak
from trainer.data.shards import TokenDataset, verify
from trainer.models import Decoder
from trainer.models.loss import HeadLoss
from trainer.plan import predict
from trainer.recipe import load_recipe


def run(cases, plan):
    return [what.partition(" in ")[0] for _, what in run_cases(cases, plan)]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)
    return path.read_text()


def assert_gone(pid: int):
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@soak
def test_whatever_becomes_of_a_case_the_others_are_measured(tmp_path):
    note = tmp_path / "note"
    cases = [case("fails"), case("dies"), case("cannot"), case("good", note=str(note))]
    assert run(cases, plan(tmp_path)) == ["failed", "died", "unsupported", "done"]
    entries = {e["case"]: e for e in State(tmp_path / "state.json").entries.values()}
    assert entries["fails"]["why"] == "ValueError: what is wrong"
    assert entries["dies"]["why"] == "SIGKILL; the last words"
    assert entries["cannot"]["why"] == "no such device"
    assert entries["good"]["figures"]["others"] == 0
    assert entries["good"].items() >= {"code": "here", "gpu": "cpu", "size": "toy"}.items()
    assert not list(tmp_path.glob("case-*")), "a scratch folder stays"

    # What is known is not run again; with retry, what failed is; with other code, everything is.
    # A module that is gone since is in nobody's way.
    state = State(tmp_path / "state.json")
    good = next(e for e in state.entries.values() if e["case"] == "good")
    state.put("gone", {**good, "case": "gone", "function": "benchmarks.gpu.gone:good"})
    known = ["known: failed", "known: died", "known: unsupported", "known: done"]
    assert run(cases, plan(tmp_path)) == known
    again = ["failed", "died", "unsupported", "known: done"]
    assert run(cases, plan(tmp_path, retry=True)) == again
    assert note.read_text() == "good\n"
    newer = replace(MACHINE, code="newer")
    assert run(cases[3:], plan(tmp_path, machine=newer)) == ["done"]
    assert note.read_text() == "good\n" * 2


@soak
def test_no_case_takes_more_than_is_left(tmp_path):
    child = tmp_path / "child"
    cases = [
        case("hangs", note=str(child)),
        case("good", seconds=20, note=str(tmp_path / "note")),
    ]
    # Time to start and to be seen hanging; then none.
    began = time.monotonic()
    hung, skipped = run(cases, plan(tmp_path, seconds=8))
    assert hung == "timed out"
    assert time.monotonic() - began < 12
    assert skipped.startswith("skipped: it takes 20 s, 0 s are left")
    assert_gone(int(child.read_text()))
    assert not (tmp_path / "note").exists()
    # What a budget cut short is run again only where there is more time.
    assert run(cases[:1], plan(tmp_path, seconds=8)) == ["known: timed out"]
    state = State(tmp_path / "state.json")
    ((key, entry),) = state.entries.items()
    state.put(key, {**entry, "seconds": 0.5})
    assert run(cases[:1], plan(tmp_path, seconds=2)) == ["timed out"]
    assert run(cases[1:], plan(tmp_path)) == ["done"]


def test_a_killed_driver_leaves_no_process_and_loses_no_result(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.gpu_cases", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline().startswith("done")
        child = int(wait_for(tmp_path / "child"))
        (hanging,) = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        driver.kill()
    assert_gone(int(hanging))
    assert len(State(tmp_path / "state.json").entries) == 1
    # What a case has put into a session of its own lives on only for what it does not start
    # through elastic.process; the driver ends that where it can still do so.
    subprocess.run(["kill", "-9", str(child)], check=True)

    (tmp_path / "child").unlink()

    # Tests that run in the background of a shell begin with interrupts ignored.
    heeding = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(heeding, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "known: done\n"
        child = int(wait_for(tmp_path / "child"))
        driver.send_signal(signal.SIGINT)
        driver.wait(60)
    assert_gone(child)
    assert (tmp_path / "note").read_text() == "good\n"


def test_the_state_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "folder" / "state.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_results_are_those_of_all_that_a_case_uses(tmp_path):
    """What only shows them is not part of it."""
    before = code_digest(tmp_path)
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    for name, uses in {"report": False, "setting": True, "sharded": True}.items():
        (tmp_path / "benchmarks" / "gpu" / f"{name}.py").write_text("1")
        assert (code_digest(tmp_path) != before) == uses, name
        before = code_digest(tmp_path)


@pytest.mark.parametrize(
    ("bound", "entry", "verdict", "why"),
    [
        (Bound("speed", ">=", 2), {"speed": 2.0}, "pass", ""),
        (Bound("speed", ">=", 2), {"speed": 1.9}, "falls short", "speed >= 2: 1.9"),
        (Bound("speed", "<=", 2), {"speed": 2.1}, "falls short", "speed <= 2: 2.1"),
        (Bound("speed", "==", 2), {"speed": 2}, "pass", ""),
        (Bound("speed", ">=", 2), {"speed": None}, "not measured", "speed >= 2: not measured"),
        (Bound("speed", ">=", 0.5, of="peer:rate"), {"speed": 4.9}, "falls short", "0.49"),
        (Bound("speed", ">=", 0.5, of="peer:rate"), {"speed": 5}, "pass", ""),
        (Bound("speed", ">=", 1, of="nobody:rate"), {"speed": 5}, "not measured", "of nobody"),
        (Bound("speed", ">=", 0.97, of="last"), {"speed": 96.0}, "falls short", "last result"),
        (Bound("speed", ">=", 0.97, of="last"), {"speed": 98.0}, "pass", ""),
        (Bound("new", ">=", 0.97, of="last"), {"new": 1.0}, "pass", ""),
    ],
)
def test_verdicts(bound, entry, verdict, why):
    one = Case("one", 0, "", 1, [bound])
    done = {"status": "done", "why": "", "figures": entry}
    found, reasons = judge(one, done, {"peer": {"rate": 10.0}}, {"speed": 100.0}, "full")
    assert found == verdict
    assert why in "".join(reasons)


def test_verdicts_on_cases_without_figures():
    one = Case("one", 0, "", 1, [Bound("speed", ">=", 2), Bound("same", "==", 1, everywhere=True)])

    def verdict(entry, size="full"):
        return judge(one, entry, {}, {}, size)[0]

    assert verdict(None) == "not measured"
    assert verdict({"status": "unsupported", "why": "", "figures": {}}) == "not measured"
    for status in ("failed", "died", "timed out"):
        assert verdict({"status": status, "why": "", "figures": {}}) == "falls short"
    slow = {"status": "done", "why": "", "figures": {"speed": 1, "same": 1}}
    assert verdict(slow) == "falls short"
    assert verdict(slow, "toy") == "pass"
    assert verdict({**slow, "figures": {"speed": 1, "same": 2}}, "toy") == "falls short"

    def standing(entry, size="full"):
        return [how for _, how, _ in standings(one, entry, {}, {}, size)]

    assert standing(slow) == ["short", "met"]
    assert standing(slow, "toy") == ["not run", "met"]
    assert standing(None) == standing({**slow, "status": "died"}) == ["not run", "not run"]


def test_the_table_of_cases():
    names = [one.name for one in CASES]
    assert len({*names}) == len(names)
    assert {one.slice for one in CASES} == {*SLICES}
    for one in CASES:
        assert one.function.startswith("benchmarks.gpu.")
        for bound in one.bounds:
            of = bound.of.rpartition(":")[0]
            assert not of or of in names, f"{one.name}: {bound}"
    assert [one.slice for one in chosen(CASES, "1")] == [1] * len(chosen(CASES, "1"))
    assert chosen(CASES, "machine.matmul,correct.fp32")[1].name == "correct.fp32"


def test_what_comes_first_fits_into_three_calls():
    """Of 520 seconds, 20 of which go to a look at the machine, and to the summary."""
    first = [one for one in CASES if one.slice in (0, 1, 3, 5)]
    assert first == list(CASES[: len(first)])
    assert all(sum(one.seconds for one in chosen(CASES, str(n))) <= 500 for n in SLICES)
    for _ in range(3):
        left = 500.0
        for one in list(first):
            if one.seconds <= left:
                left -= one.seconds
                first.remove(one)
    assert not first


def test_synthetic_documents_are_as_long_as_those_of_c4(tmp_path):
    path = data_set(tmp_path, 151_936, 1 << 20)
    data = TokenDataset(path, "train")
    assert not verify(path)
    assert data.dtype == np.uint32
    assert data.tokens >= 1 << 20
    lengths = [data.document_length(number) for number in range(data.documents)]
    assert abs(np.median(lengths) / 300 - 1) < 0.1
    assert abs(np.mean(lengths) / 480 - 1) < 0.1
    tokens = data.read(0, data.tokens)
    assert tokens.max() < 151_936
    assert tokens.max() > 150_000
    assert (tokens == EOS).sum() == data.documents
    # The same again, elsewhere; and left alone where it is.
    other = data_set(tmp_path / "other", 151_936, 1 << 20)
    assert TokenDataset(other, "train").fingerprint == data.fingerprint
    made = (path / "index.json").stat().st_mtime_ns
    assert data_set(tmp_path, 151_936, 1 << 20) == path
    assert (path / "index.json").stat().st_mtime_ns == made


H100 = "NVIDIA H100 80GB HBM3"


def measured(name, code, date, **figures):
    (one,) = [case for case in CASES if case.name == name]
    return {
        "case": name, "function": one.function, "source": source(one.function), "code": code,
        "torch": "2.11.0", "gpu": H100, "size": "full", "commit": code, "date": date,
        "status": "done", "why": "", "figures": figures,
    }  # fmt: skip


def test_results_come_into_the_tree_and_onto_the_page(tmp_path):
    state = State(tmp_path / "state.json")
    nothing = page(tmp_path)
    assert "no GPU was at hand" in nothing
    assert all(f"`{case.name}`" in nothing for case in CASES)
    assert nothing.count("\n| `") == 6, "options, and no case that was not measured"

    state.put("1", measured("machine.matmul", "aaa", "2026-12-01", tflops=800, share_of_peak=0.81))
    state.put("2", {**measured("machine.host", "aaa", "2026-12-01"), "size": "toy"})
    state.put("3", measured("correct.fp32", "aaa", "2026-12-01", difference=0.5))
    (path,) = take_in(state, tmp_path)
    assert path.name == "gpu-h100.json"
    shown = page(tmp_path)
    assert all(shown.count(f"`{case.name}`") == 1 for case in CASES)
    assert shown.count("\n| `") == 6 + 2
    assert "**pass**; share_of_peak 0.81; tflops 800 |" in shown
    assert "**falls short**; difference 0.5; difference <= 0.0001: 0.5 |" in shown
    assert "torch 2.11.0; 2 cases; 1 states of the code; 2026-12-01 to 2026-12-01" in shown

    # The next code is held against this one, the same code once more against the same.
    for code in ("bbb", "bbb"):
        more = measured("machine.matmul", code, "2026-12-02", tflops=700, share_of_peak=0.8)
        state.put(code, more)
        take_in(state, tmp_path)
        cases = read_results(path)["cases"]
        assert cases["machine.matmul"]["before"]["tflops"] == 800
        assert cases["correct.fp32"]["commit"] == "aaa", "what was not measured again stays"
    assert "tflops >= 0.97 of the last result: 0.875" in page(tmp_path)


def test_the_page_in_the_tree_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m benchmarks.gpu --report"


def test_names_of_result_files():
    names = [H100, "NVIDIA H200", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", "NVIDIA L40S"]
    assert [*map(slug, names)] == ["h100", "h200", "rtx-4090", "instinct-mi300x", "l40s"]


def make_wheel(folder: Path, name: str, module: str, more: str = ""):
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        if more:
            wheel.writestr(f"{info}/entry_points.txt", more)


@soak
def test_a_machine_without_a_registry_is_given_what_it_lacks(tmp_path):
    """A Python that has nothing but itself: only what it starts finds packages, so pip too."""
    tree = tmp_path / "tree"  # the checkout, without what an installation leaves in it
    tree.mkdir()
    for name in ("benchmarks", "trainer", "elastic", "checkpointing", "lab"):
        (tree / name).symlink_to(ROOT / name)
    (tree / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")

    def bare(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *words]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    install = (
        "import os; from pathlib import Path; from benchmarks.gpu.wheels import install;"
        "install(Path('wheels'), Path('site').absolute());"
        "import isal, torchdata; print(isal.__file__, os.environ['PYTHONPATH'])"
    )
    refused = bare("-c", install)
    assert refused.returncode == 1
    assert (
        "not installed: torch, torchdata, safetensors, tenacity, isal, cryptography, yaml, "
        in refused.stderr
    )
    assert ", perdure's rendezvous for torchrun" in refused.stderr
    assert "make gpu-wheelhouse" in refused.stderr
    (tmp_path / "wheels").mkdir()
    for name in modules():
        make_wheel(tmp_path / "wheels", name, name)
    lacking = bare("-c", install)
    assert "with the wheels in wheels: perdure's rendezvous" in lacking.stderr
    handler = "[torchrun.handlers]\nperdure = perdure:torchrun_handler\n"
    make_wheel(tmp_path / "wheels", "perdure", "of_the_wheel", handler)
    for _ in range(2):  # the second time it is there
        done = bare("-c", install)
        assert done.returncode == 0, done.stderr
        site = tmp_path / "site"
        assert done.stdout.split() == [str(site / "isal" / "__init__.py"), f"{tree}:{site}"]
    assert bare("-m", "benchmarks.gpu", "--help").returncode == 0


@soak
def test_the_command_takes_the_same_ways_on_a_cpu(tmp_path):
    state = tmp_path / "state.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "toy"]
    command += ["--state", str(state), "--only"]

    def call(only):
        done = subprocess.run(
            [*command, only], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    code, printed, errors = call("machine.matmul,machine.pinning")
    assert code == 3, printed + errors
    assert "1 pass, 1 not measured" in printed
    assert "cudaHostRegister needs a GPU" in printed
    code, printed, _ = call("machine.matmul")
    assert code == 0
    assert "known: done" in printed
    code, _, errors = call("nonsense")
    assert code == 1
    assert "--only nonsense: no slice or case" in errors


@soak
@pytest.mark.timeout(3600)
def test_every_slice_at_toy_size(tmp_path):
    state = tmp_path / "state.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "toy"]
    command += ["--budget", "3000", "--state", str(state), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "falls short" not in done.stdout
    entries = json.loads(state.read_text()).values()
    assert {entry["case"] for entry in entries} == {one.name for one in CASES}
    assert (tmp_path / "out" / "cases.log").stat().st_size > 10_000


@pytest.fixture
def setting(tmp_path):
    return Setting(device="cpu", size="toy", scratch=tmp_path, data=tmp_path, others={})


@soak
def test_one_rank_runs_fsdp(setting):
    """Under whichever program: also the one that counts."""
    counts = setting.scratch / "counts.json"
    run = correct.fsdp(
        setting, "run", ("tests.distributed.counted", str(counts)), strategy=correct.FULL_SHARD
    )
    assert units(run.output) == 3, "two blocks, and the rest"
    assert len(run.losses()) == len(json.loads(counts.read_text())) == 6


def test_without_torchao_products_in_8_bits_are_unsupported(setting, monkeypatch):
    monkeypatch.setattr(Setting, "need_gpu", lambda *_: None)
    monkeypatch.setattr(correct, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="no torchao"):
        correct.float8(setting)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras["optional-dependencies"]["fp8"]} <= {*OPTIONAL}


def test_the_minimal_loop_compiles_what_the_trainer_compiles(setting, monkeypatch):
    compiled = []
    for kind in (torch.nn.Module, HeadLoss):
        monkeypatch.setattr(kind, "compile", lambda self: compiled.append(type(self).__name__))
    monkeypatch.setattr(minimal_loop.dist, "init_process_group", lambda backend: None)
    sections = sections_of(setting, "0.6B", micro_batch=2, mask=True, recompute="none")
    sections["run"]["steps"], sections["strategy"]["compile"] = 1, True
    recipe = load_recipe(str(write_recipe(setting, "run", sections)), [])
    job = Job(recipe, rank=0, world_size=1, device=torch.device("cpu"))
    minimal_loop.train(job, Clock(job))
    assert compiled == ["Block", "Block", "HeadLoss"]

    # So does the table of losses.
    figures = speed.loss(setting, "0.6B")
    assert compiled[3:] == ["HeadLoss"]
    assert figures["perdure_compiled_loss"] == figures["perdure_loss"]


def test_attention_of_the_machine_has_grouped_heads(setting, monkeypatch):
    heads = set()

    def attention(q, k, v, **options):
        heads.add((q.shape[1], k.shape[1], v.shape[1]))
        return sdpa(q, k, v, **options)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert machine.attention(setting)["math_ms"]
    assert heads == {(16, 8, 8)}


def test_the_largest_save_fits_the_gpu_and_shared_memory(setting, monkeypatch):
    full = replace(setting, size="full")
    monkeypatch.setattr(Setting, "on_gpu", lambda self: True)
    for gpu, shared, most in ((85e9, 64e9, 64e9), (85e9, 128e9, 85e9), (150e9, 128e9, 98.3e9)):
        monkeypatch.setattr(saves, "device_memory", lambda gpu=gpu: gpu)
        monkeypatch.setattr(saves, "free_host_memory", lambda shared=shared: shared)
        nbytes = saves.BYTES * saves.largest(full)
        assert 0.9 * most < nbytes <= most
        saves.need_room(full, nbytes, to_disk=False)


@soak
def test_recipes_of_cases_are_right(tmp_path):
    """At full size, which no CPU trains."""
    setting = Setting(device="cpu", size="full", scratch=tmp_path, data=tmp_path, others={})
    data_set(tmp_path, 151_936, 1 << 22)
    sections = build_recipe(setting, "small", model={"attention": "varlen"})
    assert sections["model"]["architecture"]
    assert sections["model"]["attention"] == "varlen"
    # What is killed fills the GPUs that are lent, without touching their ends.
    for memory, expected in {85_000_000_000: ("1.7B", 4), 150_000_000_000: ("4B", 2)}.items():
        model, micro_batch = survives.filling(setting, memory, 128 << 30)
        assert (model, micro_batch) == expected
        path = write_recipe(setting, "run", survives.killed(setting, model, 1, micro_batch))
        found = predict(load_recipe(str(path), []), 1, 1, device="cuda", gpu_memory=memory)
        assert 0.65 < found.peak / memory < 0.75
    with pytest.raises(UnsupportedError, match=r"a copy of 0\.6B takes 7 GB of host memory"):
        survives.filling(setting, 85_000_000_000, 8_000_000_000)
    with pytest.raises(UnsupportedError, match="8B: 1000000000 GB of host memory, and"):
        setting.need_host(1e18, "8B")
    for model in QWEN3:
        sections = sections_of(setting, model, micro_batch=2, mask=True, recompute="full")
        path = write_recipe(setting, model, sections)
        recipe = load_recipe(str(path), [])
        assert recipe.model.architecture.vocab_size == 151_936
        with torch.device("meta"):
            decoder = Decoder(recipe.model.architecture)
        assert sum(p.numel() for p in decoder.parameters()) == PARAMETERS[model]
