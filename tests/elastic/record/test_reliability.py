"""The save interval follows stall and failures, within bounds."""

from math import exp

import pytest

from elastic.record.reliability import SaveClock, best_interval, expected_mtbf


def lost(interval, stall, mtbf):
    """Daly's exact model without restart cost: wall time per time of work done."""
    return mtbf * (exp((interval + stall) / mtbf) - 1) / interval


@pytest.mark.parametrize(("stall", "mtbf"), [(0.05, 600), (1, 3600), (10, 3600), (20, 7200)])
def test_no_other_interval_loses_less(stall, mtbf):
    best = best_interval(stall, mtbf)
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert lost(best, stall, mtbf) <= lost(best * factor, stall, mtbf)


def test_a_known_value():  # by hand: sqrt(2·10·3600) (1 + sqrt(10/7200)/3 + 10/64800) - 10
    assert best_interval(10, 3600) == pytest.approx(261.706, abs=0.01)


def test_bounds():
    assert best_interval(0.01, 1e9) == 1800
    assert best_interval(300, 3600) == 3000  # ten stalls come before half an hour
    assert best_interval(5, 1) == 50
    assert best_interval(0, 3600) == 0


def test_more_failures_mean_a_shorter_mtbf_and_more_nodes_too():
    day = 24 * 3600
    assert expected_mtbf(0, 0, 1) == day
    assert expected_mtbf(0, 0, 8) == day / 8
    assert expected_mtbf(9, 9 * day, 1) == day
    assert expected_mtbf(99, 100 * 3600, 4) == pytest.approx(3600 / 4, rel=0.25)
    assert expected_mtbf(0, 30 * day, 1) > day


@pytest.mark.parametrize("arguments", [(-1, 5), (1, 0), (float("nan"), 5)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="must be at least 0"):
        best_interval(*arguments)


def test_a_run_measures_its_first_checkpoint_and_then_saves_as_often_as_pays():
    clock = SaveClock(mtbf=7200.0, now=100.0)
    assert not clock.due(159.0)
    assert clock.due(160.0)
    clock.begun(160.0, stall=0.5)
    assert clock.interval == best_interval(0.5, 7200.0)
    assert not clock.due(160.0 + clock.interval - 1)
    assert clock.due(160.0 + clock.interval)
    clock.written(300.0)
    assert clock.interval == 600.0
