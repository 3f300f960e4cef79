"""The picture of pipeline schedules in docs/parallelism.md, drawn from the simulator.

`python docs/schedules.py` draws it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

from pathlib import Path

from trainer.parallel.schedules import COST, arranged, schedule, simulate
from trainer.tools.svg import SOFT, bar, document, label

IMAGE = Path(__file__).parent / "images/schedules.svg"
RANKS, COUNT = 4, 8
SHOWN = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))
COLORS = {"F": "#8fb4d9", "B": "#e8a87c", "I": "#e8a87c", "W": "#a9cf9b"}
UNIT, ROW, LEFT, PANEL = 24.0, 20, 60, 130


def picture() -> str:
    """What each rank does when, with four ranks and eight micro-batches, one panel a schedule."""
    body = []
    for number, (name, per_rank) in enumerate(SHOWN):
        cost = {kind: seconds / per_rank for kind, seconds in COST.items()}
        found, top = (
            simulate(arranged(schedule(name, RANKS, per_rank, COUNT)), cost),
            number * PANEL + 10,
        )
        title = f"{name}: idle for {found.bubble:.1%}"
        held = ", ".join(f"{held / per_rank:g}" for held in found.arrangement.held)
        body.append(label(LEFT, top + 12, f"{title}; micro-batches held at most: {held}"))
        for rank in range(RANKS):
            y = top + 22 + rank * ROW
            body.append(label(LEFT - 8, y + 13, f"rank {rank}", "end", SOFT))
            for (owner, (kind, stage, micro_batch), _), began, ended in zip(
                found.arrangement.steps, found.began, found.ended, strict=True
            ):
                if owner != rank:
                    continue
                x, width = LEFT + began * UNIT, (ended - began) * UNIT
                tip = f"{kind} of micro-batch {micro_batch}, stage {stage}"
                body.append(bar(x, y, width - 1, ROW - 2, tip, fill=COLORS[kind]))
                body.append(label(x + width / 2, y + 13, f"{micro_batch}", "middle", size=9))
    keys = {"F": "forward", "B": "backward, or its part for the input", "W": "its part for weights"}
    x = float(LEFT)
    for kind, meaning in keys.items():
        y = len(SHOWN) * PANEL + 10
        body += [bar(x, y, 14, 14, meaning, fill=COLORS[kind]), label(x + 20, y + 12, meaning)]
        x += 40 + 6.5 * len(meaning)
    return document(int(LEFT + 33 * UNIT + 20), len(SHOWN) * PANEL + 40, body)


if __name__ == "__main__":
    IMAGE.write_text(picture(), encoding="utf-8")
