"""What came of a run in a bucket: `bucket_verdict.py URL DIRECTORY STEPS`, in a process that
reaches the bucket. DIRECTORY is the same run on a local disk, to which nothing happened."""

import logging
import sys
from pathlib import Path

from checkpointing.storage.place import ObjectPath
from checkpointing.tools.diff import diff
from elastic.record.history import read_history
from trainer.run.parts import LINES, RunPartsReader, parts_of
from trainer.run.terms import TERMS, newest_term
from trainer.tools.mirror import local_runs
from trainer.tools.report.report import check, read_metrics


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of every record with a loss, in their order."""
    return [(one["step"], one["loss"]) for one in read_metrics(run) if "loss" in one]


def main(url: str, directory: str, steps: int) -> None:
    """Fail unless all is as it should be."""
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("trainer.run.parts").addHandler(listener)
    run, undisturbed = ObjectPath.of(url), Path(directory)
    with local_runs([run]) as (copy,):
        history = read_history(copy.directory)
        fine, text = check(history, copy.directory)
        print(text)
        assert fine, text
        assert history.step == steps
        assert not history.unrecorded, "a line of a committed step is lost"
        assert losses(copy.directory) == losses(undisturbed), "other losses, or not each once"
    for term in range(1, newest_term(run) + 1):
        reached = 0
        for first, after in parts_of(run, term):
            assert first <= reached, f"lines {reached} to {first} of term {term} are missing"
            reached = max(reached, after)
    found = diff(f"{url}/checkpoints", str(undisturbed / "checkpoints"))
    other = [*found.only_left, *found.only_right, *found.metas, *found.values]
    assert not other, f"tensors differ: {other[:3]}"
    assert not warnings, warnings  # parts left out
    print(
        f"{len(history.attempts)} attempts of {newest_term(run)} {TERMS}, "
        f"{len(RunPartsReader(run).lines())} {LINES}, {found.identical} tensors bitwise equal"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
