"""Plans and step rows, as tables of cases."""

import pytest

from tunebook.plan import (
    MixedRows,
    checkpoint_steps,
    epoch_rows,
    make_plan,
    mix,
    step_rows,
    steps,
    stream_rows,
)


def whole(num_rows: int) -> tuple[MixedRows, ...]:
    return (MixedRows(tuple(range(num_rows)), 1.0),)


@pytest.mark.parametrize(
    (
        "rows",
        "batch",
        "epochs",
        "max_steps",
        "drop",
        "per_epoch",
        "planned",
        "shown_epochs",
        "unused",
    ),
    [
        (152, 8, 3, None, False, 19, 57, 3.0, 0),  # the design's example; J1
        (18, 32, 1, None, False, 1, 1, 1.0, 0),  # case 30: one step on 18 rows
        (10, 4, 1, None, False, 3, 3, 1.0, 0),  # case 29: keep
        (10, 4, 1, None, True, 2, 2, 1.0, 2),  # case 29: drop, 2 of 10 unused
        (5, 2, 3, None, False, 3, 9, 3.0, 0),  # case 29: 9/9
        (30, 12, None, 12, False, 3, 12, 4.0, 0),  # case 27: 4.0 epochs, not 6
        (64, 8, 2, None, False, 8, 16, 2.0, 0),  # case 28
        (30, 12, 0.5, None, False, 3, 2, 2 / 3, 0),  # ceil(3 * 0.5)
        (100, 10, 0.1, None, False, 10, 1, 0.1, 0),  # exact: 10 * 0.1 is 1, not 1.0000000000000002
        (100, 10, 0.3, None, False, 10, 3, 0.3, 0),
        (7, 7, 1, None, True, 1, 1, 1.0, 0),
    ],
)
def test_plan_table(rows, batch, epochs, max_steps, drop, per_epoch, planned, shown_epochs, unused):
    plan = make_plan(rows, batch_size=batch, epochs=epochs, max_steps=max_steps, drop_last=drop)
    assert (plan.steps_per_epoch, plan.planned_steps) == (per_epoch, planned)
    assert plan.epochs == pytest.approx(shown_epochs)
    assert plan.unused_rows_per_epoch == unused
    assert plan.by_max_steps == (max_steps is not None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 1, "max_steps": 7}, ["plan.epochs=1", "plan.max_steps=7", "exactly one"]),
        ({"epochs": None, "max_steps": None}, ["exactly one"]),
        ({"batch_size": 0}, ["plan.batch_size=0"]),
        ({"epochs": 0}, ["plan.epochs=0"]),
        ({"epochs": float("nan")}, ["plan.epochs=nan"]),
        ({"epochs": None, "max_steps": 0}, ["plan.max_steps=0"]),
        ({"batch_size": 32, "drop_last": True}, ["18", "32"]),  # case 30: both numbers
        ({"train_rows": 0}, ["0 usable train rows"]),
    ],
)
def test_impossible_plans_name_key_and_value(changes, words):
    settings = {
        "train_rows": 18,
        "batch_size": 8,
        "epochs": 1,
        "max_steps": None,
        "drop_last": False,
    }
    settings.update(changes)
    with pytest.raises(ValueError) as raised:
        make_plan(settings.pop("train_rows"), **settings)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("planned", "every", "expected"),
    [
        (11, 5, (5, 10, 11)),
        (10, 5, (5, 10)),
        (3, 5, (3,)),
        (7, 0, (7,)),
        (1, 1, (1,)),
        (57, 20, (20, 40, 57)),
    ],
)
def test_checkpoint_steps(planned, every, expected):
    """Case 46: the last step is always there, and never twice."""
    assert checkpoint_steps(planned, checkpoint_every=every) == expected


def test_every_row_once_per_epoch():
    for epoch in range(3):
        assert sorted(epoch_rows(whole(10), seed=7, epoch=epoch)) == list(range(10))


def test_epoch_orders_differ_and_follow_the_seed():
    """Case 34: epochs differ from each other and from file order; the seed decides."""
    orders = [epoch_rows(whole(10), seed=7, epoch=epoch) for epoch in range(3)]
    assert len({*orders, tuple(range(10))}) == 4
    assert orders == [epoch_rows(whole(10), seed=7, epoch=epoch) for epoch in range(3)]
    assert orders[0] != epoch_rows(whole(10), seed=8, epoch=0)


def test_order_is_pinned_across_versions():
    """A recorded order: a change here would break every resume."""
    assert epoch_rows(whole(6), seed=0, epoch=0) == PINNED_ORDER


PINNED_ORDER = (1, 3, 4, 0, 2, 5)


@pytest.mark.parametrize("done", range(16))
def test_steps_after_k_are_the_tail(done):
    """Cases 32 and 33: 10 rows, batch 2, 3 epochs, stopped anywhere, also at an epoch's edge."""
    plan = make_plan(10, batch_size=2, epochs=3, max_steps=None, drop_last=False)
    unbroken = list(steps(plan, whole(10), seed=3, done=0))
    assert [step for step, _ in unbroken] == list(range(1, 16))
    assert list(steps(plan, whole(10), seed=3, done=done)) == unbroken[done:]


def test_partial_last_batch_is_a_step_and_all_rows_are_seen():
    """Case 29: 10 rows, batch 4: sizes 4, 4, 2."""
    plan = make_plan(10, batch_size=4, epochs=1, max_steps=None, drop_last=False)
    batches = [rows for _, rows in steps(plan, whole(10), seed=0, done=0)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(row for batch in batches for row in batch) == list(range(10))


def test_max_steps_wraps_over_epochs():
    """Case 36: 25 steps over 4 batches an epoch."""
    plan = make_plan(8, batch_size=2, epochs=None, max_steps=25, drop_last=False)
    batches = [rows for _, rows in steps(plan, whole(8), seed=0, done=0)]
    assert len(batches) == 25
    for epoch in range(6):
        seen = [row for batch in batches[epoch * 4 : epoch * 4 + 4] for row in batch]
        assert sorted(seen) == list(range(8))


def test_more_epochs_keep_the_first_steps():
    short = make_plan(10, batch_size=3, epochs=2, max_steps=None, drop_last=False)
    long = make_plan(10, batch_size=3, epochs=3, max_steps=None, drop_last=False)
    first = list(steps(short, whole(10), seed=1, done=0))
    assert list(steps(long, whole(10), seed=1, done=0))[: len(first)] == first


def test_weights_are_appearances_per_epoch():
    sources = mix(range(13), [0] * 4 + [1] * 6 + [2] * 3, [2.0, 0.5, 1.0])
    assert [source.rows_per_epoch for source in sources] == [8, 3, 3]
    epochs = [epoch_rows(sources, seed=0, epoch=epoch) for epoch in range(4)]
    for rows in epochs:
        assert [rows.count(row) for row in range(4)] == [2, 2, 2, 2]
        assert [rows.count(row) for row in range(10, 13)] == [1, 1, 1]
    # Half weight: two epochs together show each row of that source exactly once.
    for pair in (epochs[:2], epochs[2:]):
        assert sorted(row for rows in pair for row in rows if 4 <= row < 10) == list(range(4, 10))


def test_half_a_row_more_is_a_row():
    assert [source.rows_per_epoch for source in mix(range(5), [0] * 5, [0.5])] == [3]
    assert [source.rows_per_epoch for source in mix(range(1), [0], [0.1])] == [1]


def test_step_rows_beyond_the_plan_are_defined():
    plan = make_plan(4, batch_size=2, epochs=1, max_steps=None, drop_last=False)
    assert sorted(
        step_rows(plan, whole(4), seed=0, step=3) + step_rows(plan, whole(4), seed=0, step=4)
    ) == [0, 1, 2, 3]


def test_the_stream_is_the_epochs_one_after_the_other():
    """10 rows, 4 a step: 3 steps an epoch; the stream has the rows of the steps in their order."""
    sources = (MixedRows(tuple(range(10)), 1.0),)
    plan = make_plan(10, batch_size=4, epochs=2, max_steps=None, drop_last=False)
    by_step = [row for _, rows in steps(plan, sources, seed=7, done=0) for row in rows]
    assert stream_rows(sources, seed=7, start=0, count=20) == tuple(by_step)
    assert stream_rows(sources, seed=7, start=9, count=3) == tuple(by_step[9:12])
