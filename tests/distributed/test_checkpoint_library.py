"""The loop in docs/checkpoint_library.md does what that page says."""

import re

from tests.distributed.jobs import ROOT, Job


def run_loop(folder, ranks: int) -> str:
    page = (ROOT / "docs" / "checkpoint_library.md").read_text()
    (folder / "loop.py").write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    code, output = Job(folder, ranks, program=["loop"], torchrun=True).wait()
    assert code == 0, output
    return output


def test_the_example_trains_saves_and_goes_on_in_another_world(tmp_path):
    assert f"saved {tmp_path}/checkpoints/step-" in run_loop(tmp_path, 2)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000100"
    assert len(steps) == 2
    assert "saved" not in run_loop(tmp_path, 1), "it was finished"
