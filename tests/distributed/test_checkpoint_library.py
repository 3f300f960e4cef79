"""The loops in examples/ that save and go on, by the checkpoint library alone."""

import difflib
import re
import time

import pytest

from tests.distributed.jobs import ROOT, Job

EXAMPLES = ROOT / "examples"
STEPS = "STEPS, GLOBAL_BATCH = 40, "
"""Fewer than the examples take."""


def start(folder, name: str, ranks: int) -> Job:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert "STEPS, GLOBAL_BATCH = 60, " in text
    (folder / f"{name}.py").write_text(text.replace("STEPS, GLOBAL_BATCH = 60, ", STEPS))
    return Job(folder, ranks, program=[name], torchrun=True)


def run(folder, name: str, ranks: int) -> dict[int, float]:
    code, output = start(folder, name, ranks).wait()
    assert code == 0, output
    return losses(output)


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)\n", output)}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"), "fsdp_loop", 1)


def test_a_loop_that_saves_is_killed_and_goes_on_in_another_world(tmp_path, undisturbed):
    first = start(tmp_path, "fsdp_loop_saved", 2)
    deadline = time.monotonic() + 60
    while max(losses(first.output()), default=0) < 35:
        assert not first.ended(), first.output()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    before = losses(first.output())
    after = run(tmp_path, "fsdp_loop_saved", 3)
    assert min(after) > 10  # of the two saves before, the older one was certainly committed
    assert min(after) % 10 == 1
    assert before | after == pytest.approx(undisturbed, abs=1e-5)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000030", "step-00000040"], "it ended before its last save had"
    assert run(tmp_path, "fsdp_loop_saved", 1) == {}, "it was finished"


def test_saving_takes_ten_lines():
    texts = [
        (EXAMPLES / f"{name}.py").read_text().splitlines()
        for name in ("fsdp_loop", "fsdp_loop_saved")
    ]
    assert len(texts[0]) <= 51
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert len(changed) <= 10
