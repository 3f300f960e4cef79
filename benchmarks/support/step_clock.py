"""A constant learning rate whose function writes down when each rank asks for it: once a step,
between gradients and update."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def schedule(steps: int, lr: float, folder: str) -> Callable[[int], float]:
    """Each call adds a line to `folder`/RANK.txt: step, CPU seconds of this process, and seconds of
    a monotonic clock."""
    path = Path(folder) / f"{os.environ.get('RANK', '0')}.txt"

    def rate(step: int) -> float:
        with path.open("a") as file:
            file.write(f"{step} {time.process_time()} {time.perf_counter()}\n")
        return lr

    return rate


def seconds_by_step(folder: Path) -> dict[int, tuple[float, float]]:
    """Step → (CPU seconds of all ranks, wall-clock seconds) since the step before."""
    found: dict[int, list[tuple[float, float]]] = {}
    for path in folder.glob("*.txt"):
        # Of several calls for a step the last is that of training.
        lines = [line.split() for line in path.read_text().splitlines()]
        asked = {int(step): (float(cpu), float(at)) for step, cpu, at in lines}
        for step, (cpu, at) in asked.items():
            if step - 1 in asked:
                before = asked[step - 1]
                found.setdefault(step, []).append((cpu - before[0], at - before[1]))
    return {
        step: (sum(cpu for cpu, _ in of_ranks), max(wall for _, wall in of_ranks))
        for step, of_ranks in found.items()
    }
