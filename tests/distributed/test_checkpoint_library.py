"""The loop in docs/checkpoint_library.md does what that page says."""

import os
import re
import subprocess
import sys

from tests.distributed.jobs import ROOT


def run_loop(folder, ranks: int) -> str:
    page = (ROOT / "docs" / "checkpoint_library.md").read_text()
    (folder / "loop.py").write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "loop.py"],
        cwd=folder, capture_output=True, text=True, timeout=90, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_example_trains_saves_and_goes_on_in_another_world(tmp_path):
    assert f"saved {tmp_path}/checkpoints/step-" in run_loop(tmp_path, 2)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000100"
    assert len(steps) == 2
    assert "saved" not in run_loop(tmp_path, 1), "it was finished"
