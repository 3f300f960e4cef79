"""Whatever is killed when, and however many ranks go on: the same samples, each epoch once."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.group.batch_plan import plan_batch
from trainer.data.loader import TokenStream, load
from trainer.data.order import Order

# One life of a job: ranks, micro-batch limit, steps until it is killed, steps between saves,
# background workers.
lives = st.tuples(
    st.integers(1, 17), st.integers(1, 9), st.integers(0, 12), st.integers(1, 5), st.integers(0, 2)
)


def run(history, global_batch, fetch):
    """Train through `history`, resuming from the newest save each time.

    Args:
        history: lives.
        global_batch: sequences per step.
        fetch: (requests of a rank, their number, workers) → samples of each request.

    Returns:
        The samples of every step that survived.
    """
    saved, steps = 0, []
    for world_size, micro_batch, life, save_every, workers in history:
        plan = plan_batch(global_batch, world_size, micro_batch)
        start, steps = saved, steps[: saved // global_batch]
        made = [[] for _ in range(life)]
        for rank in range(world_size):

            def endless(rank=rank, start=start, plan=plan):
                while True:
                    yield from plan.micro_batches(rank, start)
                    start += plan.global_batch

            passes = list(islice(endless(), life * plan.passes))
            requests = (one.positions for one in endless())
            batches = fetch(requests, len(passes), workers)
            for number, (one, batch) in enumerate(zip(passes, batches, strict=True)):
                assert len(batch) == len(one.positions) <= micro_batch
                if one.real:
                    made[number // plan.passes] += batch
        steps += [sorted(step) for step in made]
        saved += life // save_every * save_every * global_batch
    return steps[: saved // global_batch]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    global_batch=st.integers(17, 40),
    history=st.lists(lives, min_size=1, max_size=6),
)
def test_any_history_is_the_uninterrupted_one(sizes, global_batch, history):
    order = Order(sizes, [1.0] * len(sizes), seed=5)

    def fetch(requests, count, workers):
        ahead = [next(requests) for _ in range(count + 8 * workers)]  # read ahead, and lost
        # The order is a pure function of positions: one call stands for one per request.
        positions = np.array([position for one in ahead[:count] for position in one], np.int64)
        found = zip(*(values.tolist() for values in order.locate(positions)), strict=True)
        return [list(islice(found, len(one))) for one in ahead[:count]]

    steps = run(history, global_batch, fetch)
    whole = np.stack(order.locate(np.arange(len(steps) * global_batch)), axis=1)
    for step, expected in zip(steps, np.split(whole, len(steps)) if steps else [], strict=True):
        assert step == sorted(map(tuple, expected.tolist()))
    seen = [sample for step in steps for sample in step]
    assert len(seen) == len(set(seen))
    if len(sizes) == 1:
        for epoch in range(len(seen) // sizes[0]):
            mine = sorted(sample for _, e, sample in seen if e == epoch)
            assert mine == list(range(sizes[0]))


@pytest.mark.parametrize("seed", range(3))
def test_real_loaders_with_real_workers(prepared, seed):
    stream = TokenStream.open([(prepared, 1.0)], split="train", seq_len=64, seed=seed, shuffle=True)
    random = np.random.default_rng(seed)
    history = [
        (int(random.integers(1, 4)), int(random.integers(1, 5)), int(random.integers(1, 6)), 2, w)
        for w in (2, 0, 1)
    ]

    def fetch(requests, count, workers):
        batches = load(stream, requests, workers=workers, pin_memory=False)
        return [batch["input_ids"].tolist() for batch in islice(batches, count)]

    steps = run(history, 16, fetch)
    alone = run([(1, 16, len(steps), 1, 0)], 16, fetch)
    assert len(steps) > 1
    assert steps == alone
