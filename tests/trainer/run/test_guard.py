"""Bad numbers are skipped, counted, and in the end stop the run with a reason."""

from trainer.run.guard import judge_step

NAN, INF = float("nan"), float("inf")


def test_good_numbers_are_kept():
    assert judge_step(7, 2.0, 1.0, [], skipped=0, limit=3).action == "keep"


def test_a_bad_loss_is_skipped_and_named():
    verdict = judge_step(7, NAN, NAN, [2], skipped=0, limit=3)
    assert verdict.action == "skip"
    assert "step 7: loss is nan" in verdict.reason
    assert "rank 2" in verdict.reason


def test_a_bad_gradient_is_skipped():
    verdict = judge_step(7, 2.0, INF, [], skipped=2, limit=3)
    assert verdict.action == "skip"
    assert "grad norm inf" in verdict.reason


def test_too_many_in_a_row_stop_the_run():
    verdict = judge_step(7, NAN, NAN, [0, 1], skipped=3, limit=3)
    assert verdict.action == "stop"
    assert "step 7" in verdict.reason
    assert "rank 0, 1" in verdict.reason
    assert "max_skipped_steps" in verdict.reason
