import pytest

from tunebook.serve.rates import HOSTED, PRESETS, RateLimiter


def ask(limiter, action, now, *, project="p", session="s"):
    return limiter.wait_s(action, project=project, session=session, now=now)


@pytest.mark.parametrize(
    ("action", "burst", "period_s"),
    [
        ("create-resource", 5, 180.0),
        ("create-session", 5, 3.0),
        ("forward-backward", 40, 0.05),
        ("forward", 40, 0.05),
        ("custom-forward-backward", 40, 0.05),
        ("optim-step", 40, 0.05),
        ("weights-sync", 40, 0.05),
        ("sample", 1000, 0.0005),
        ("training-checkpoint", 5, 6.0),
        ("inference-checkpoint", 5, 6.0),
        ("download", 20, 0.1),
    ],
)
def test_limits_of_the_hosted_service(action, burst, period_s):
    limiter = RateLimiter(HOSTED)
    assert [ask(limiter, action, 100.0) for _ in range(burst)] == [None] * burst
    assert ask(limiter, action, 100.0) == pytest.approx(period_s)
    assert ask(limiter, action, 100.0) == pytest.approx(period_s)  # a refused call takes nothing
    assert ask(limiter, action, 100.0 + period_s / 2) == pytest.approx(period_s / 2)
    assert ask(limiter, action, 100.0 + period_s) is None
    assert ask(limiter, action, 100.0 + period_s) == pytest.approx(period_s)


def test_waiting_as_told_is_enough():
    limiter = RateLimiter(HOSTED)
    now, passed = 0.0, 0
    for _ in range(2000):
        wait_s = ask(limiter, "optim-step", now)
        passed += wait_s is None
        now += wait_s or 0.0
    assert passed >= 1000 - 40
    assert now == pytest.approx((passed - 40) * 0.05, abs=0.06)


def test_a_burst_comes_back_after_a_quiet_time():
    limiter = RateLimiter(HOSTED)
    for start in (0.0, 1000.0):
        answers = [ask(limiter, "create-session", start) for _ in range(6)]
        assert answers[:5] == [None] * 5
        assert answers[5] == pytest.approx(3.0)


def test_who_has_a_bucket_of_its_own():
    limiter = RateLimiter(HOSTED)
    for _ in range(40):
        assert ask(limiter, "optim-step", 0.0, session="a") is None
    assert ask(limiter, "optim-step", 0.0, session="a") is not None
    assert ask(limiter, "optim-step", 0.0, session="b") is None
    assert ask(limiter, "forward-backward", 0.0, session="a") is None
    for session in "abcde":
        assert ask(limiter, "create-session", 0.0, session=session) is None
    assert ask(limiter, "create-session", 0.0, session=None) is not None
    assert ask(limiter, "create-session", 0.0, session=None, project="q") is None


def test_both_kinds_of_checkpoint_share_a_bucket():
    limiter = RateLimiter(HOSTED)
    kinds = ["training-checkpoint", "inference-checkpoint"] * 3
    answers = [ask(limiter, kind, 0.0) for kind in kinds]
    assert answers[:5] == [None] * 5
    assert answers[5] == pytest.approx(6.0)


def test_no_limits():
    limiter = RateLimiter(PRESETS["none"])
    assert all(ask(limiter, "create-resource", 0.0) is None for _ in range(100))


def test_buckets_of_old_sessions_are_let_go():
    limiter = RateLimiter(HOSTED)
    for index in range(20_000):
        assert ask(limiter, "optim-step", float(index), session=str(index)) is None
    assert len(limiter._full_at) < 5000
