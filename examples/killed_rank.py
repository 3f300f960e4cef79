"""Train a recipe, and kill one of its ranks on the way: the run goes on by itself.

python -m examples.killed_rank STEP RECIPE.yaml [key=value …]      SIGKILL once STEP is recorded
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.support import json_lines
from lab.local_nodes import LocalNode
from trainer import load_recipe


def main() -> int:
    """The exit code of the run."""
    step, recipe = int(sys.argv[1]), sys.argv[2:]
    metrics = Path(load_recipe(recipe[0], recipe[1:]).run.dir, "metrics.jsonl")
    run = subprocess.Popen([sys.executable, "-m", "trainer.cli", "train", *recipe])
    node = LocalNode(0, run, Path(os.devnull))
    while run.poll() is None and not any(line["step"] >= step for line in json_lines(metrics)):
        time.sleep(0.1)
    if run.poll() is None and (ranks := node.trainers()):
        print(f"--- kill -9 {ranks[-1]}: a rank is gone ---", flush=True)
        os.kill(ranks[-1], signal.SIGKILL)
    return run.wait()


if __name__ == "__main__":
    sys.exit(main())
