"""The held-out split: counts, membership, and what never moves."""

import pytest

from tunebook.split import RowIdentity, eval_row_count, split_rows

DEFAULTS = {"fraction": 0.05, "min_rows": 8, "max_rows": 512}


def identities(names, contents=None):
    contents = contents or names
    return [
        RowIdentity(f"id:{name}", f"content:{content}", f"content:{content}")
        for name, content in zip(names, contents, strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(0, 0), (1, 0), (159, 0), (160, 8), (200, 10), (10_239, 511), (10_240, 512), (10**6, 512)],
)
def test_counts_of_the_design(rows, expected):
    assert eval_row_count(rows, **DEFAULTS) == expected


@pytest.mark.parametrize(
    ("rows", "fraction", "min_rows", "expected"),
    [
        (10, 0.1, 1, 1),
        (10, 0.3, 1, 3),  # 10 * 0.3 is 3.0000000000000004 or 2.9999999999999996 in floats
        (100, 0.29, 1, 29),  # 100 * 0.29 is 28.999999999999996 in floats
        (5, 0.1, 1, 0),
        (5, 0.2, 1, 1),  # case 39: 1 eval + 4 train
        (100, 0, 0, 0),
    ],
)
def test_exact_integer_arithmetic(rows, fraction, min_rows, expected):
    assert eval_row_count(rows, fraction=fraction, min_rows=min_rows, max_rows=512) == expected


def test_sides_are_disjoint_and_complete_and_not_the_first_rows():
    """Case 38: not rows 1..n of a sorted file."""
    rows = identities([f"row{n:03d}" for n in range(100)])
    split = split_rows(rows, num_eval=10, remembered={})
    assert len(split.eval) == 10
    assert sorted(split.train + split.eval) == list(range(100))
    assert split.eval != tuple(range(10))
    assert split.eval != tuple(range(90, 100))


def test_membership_follows_identity_not_position():
    names = [f"row{n}" for n in range(50)]
    forward = split_rows(identities(names), num_eval=5, remembered={})
    backward = split_rows(identities(names[::-1]), num_eval=5, remembered={})
    assert {names[index] for index in forward.eval} == {
        names[::-1][index] for index in backward.eval
    }


def test_a_larger_eval_set_contains_the_smaller():
    rows = identities([f"row{n}" for n in range(50)])
    small = split_rows(rows, num_eval=5, remembered={})
    large = split_rows(rows, num_eval=12, remembered={})
    assert set(small.eval) < set(large.eval)


@pytest.mark.parametrize("num_eval", range(2, 11))
def test_identical_rows_share_a_side(num_eval):
    """Case 37: r03 and r17 have the same text under different ids."""
    names = [f"r{n:02d}" for n in range(1, 21)]
    contents = ["three" if name in ("r03", "r17") else name for name in names]
    split = split_rows(identities(names, contents), num_eval=num_eval, remembered={})
    assert (2 in split.eval) == (16 in split.eval)
    assert len(split.eval) == num_eval


@pytest.mark.parametrize("num_eval", [2, 4, 6, 8, 10])
def test_what_says_the_same_shares_a_side(num_eval):
    """Case 37 where every text is written down in two ways."""
    rows = [RowIdentity(*[f"content:{n}"] * 2, f"content:{n // 2}") for n in range(20)]
    split = split_rows(rows, num_eval=num_eval, remembered={})
    assert {index ^ 1 for index in split.eval} == set(split.eval)
    assert len(split.eval) == num_eval


@pytest.mark.parametrize("num_eval", [2, 4, 6, 8, 10])
def test_groups_and_identical_rows_share_a_side(num_eval):
    """Case 37 with `group_column=doc`: d02 and d09 are linked by the shared text."""
    rows = [
        RowIdentity(f"group:d{n // 2:02d}", *["three" if n in (2, 16) else f"content:{n}"] * 2)
        for n in range(20)
    ]
    split = split_rows(rows, num_eval=num_eval, remembered={})
    for doc in range(10):
        assert (2 * doc in split.eval) == (2 * doc + 1 in split.eval)
    assert (2 in split.eval) == (16 in split.eval)
    assert len(split.eval) == num_eval


def test_added_rows_move_nobody():
    old = identities([f"row{n}" for n in range(160)])
    first = split_rows(old, num_eval=8, remembered={})
    new = identities([f"new{n}" for n in range(160)])
    second = split_rows(new + old, num_eval=16, remembered=first.assignments)
    assert {index - 160 for index in second.eval if index >= 160} == set(first.eval)
    assert len(second.eval) == 16


def test_a_small_dataset_that_grows_takes_eval_rows_from_the_new_ones():
    old = identities([f"row{n}" for n in range(100)])
    first = split_rows(old, num_eval=0, remembered={})
    second = split_rows(
        old + identities([f"new{n}" for n in range(100)]), num_eval=10, remembered=first.assignments
    )
    assert len(second.eval) == 10
    assert min(second.eval) >= 100


def test_removed_rows_are_remembered():
    rows = identities([f"row{n}" for n in range(40)])
    first = split_rows(rows, num_eval=4, remembered={})
    without = split_rows(rows[:20], num_eval=4, remembered=first.assignments)
    again = split_rows(rows, num_eval=4, remembered=without.assignments)
    # Rows held out at first stay held out; the smaller set may have been topped up meanwhile.
    assert set(first.eval) <= set(again.eval)


def test_an_edited_row_with_an_id_keeps_its_side():
    names = [f"row{n}" for n in range(40)]
    first = split_rows(identities(names), num_eval=4, remembered={})
    edited = split_rows(
        identities(names, [n + " edited" for n in names]), num_eval=4, remembered=first.assignments
    )
    assert edited.eval == first.eval


def test_a_row_that_links_both_sides_moves_neither():
    rows = [RowIdentity(f"group:g{n}", *[f"content:{n}"] * 2) for n in range(20)]
    first = split_rows(rows, num_eval=5, remembered={})
    held, trained = first.eval[0], first.train[0]
    link = RowIdentity(rows[held].key, rows[trained].content, rows[trained].text)
    second = split_rows([*rows, link], num_eval=5, remembered=first.assignments)
    assert held in second.eval
    assert trained in second.train
