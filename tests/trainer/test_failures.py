"""An error of one rank is told at once, to people and to the agent, and only once."""

import pytest

from elastic import EXIT_FAILED, EXIT_WRONG_INPUT
from elastic.progress import ProgressPage, Pulse
from trainer.data.shards import DataError
from trainer.failures import Telling


@pytest.mark.parametrize(
    ("error", "code", "first", "last"),
    [
        (
            MemoryError("CUDA out of memory.\nTried to"),
            EXIT_FAILED,
            "rank 3 failed:\nTraceback",
            "MemoryError: CUDA out of memory.\nTried to\n",
        ),
        (
            DataError("train-0.tokens: token 9"),
            EXIT_WRONG_INPUT,
            "error: train",
            "0.tokens: token 9\n",
        ),
    ],
)
def test_an_error_is_told_before_what_it_unwinds_waits(capsys, error, code, first, last):
    page = ProgressPage.make()
    pulse = Pulse(page, 0)
    pulse.report(15, "step")
    telling = Telling(pulse, 3)

    class Waits:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            told = capsys.readouterr().err
            assert told.startswith(first)
            assert told.endswith(last)
            assert page.read(0).phase == "failed"

    with pytest.raises(type(error)), Waits(), telling:
        raise error
    assert telling.tell(error, wait=60) == code
    assert capsys.readouterr().err == ""
    assert page.read(0).error == f"{type(error).__name__}: {error}".partition("\n")[0]
