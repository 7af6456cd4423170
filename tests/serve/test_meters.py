import threading

import pytest

from tunebook.serve.meters import Counter, Gauge, Histogram, prometheus_text


def test_text():
    """Format: https://prometheus.io/docs/instrumenting/exposition_formats/"""
    requests = Counter("tunebook_requests_total", "Requests.", ["method", "status"])
    restarts = Counter("tunebook_restarts_total", "Restarts.")
    sessions = Gauge("tunebook_sessions", "Sessions\nalive \\ running.", ["status"])
    waits = Histogram("tunebook_wait_seconds", "Waits.", bounds=[0.1, 1])
    requests.add(method="POST", status="200")
    requests.add(2, method="POST", status="200")
    requests.add(method="GET", status="404")
    sessions.set(3, status='a "b" \\ c\nd')
    sessions.set(2.5, status='a "b" \\ c\nd')
    for value in (0.05, 0.1, 0.5, 7.0):
        waits.observe(value)
    assert prometheus_text([requests, restarts, sessions, waits]).splitlines() == [
        "# HELP tunebook_requests_total Requests.",
        "# TYPE tunebook_requests_total counter",
        'tunebook_requests_total{method="GET",status="404"} 1',
        'tunebook_requests_total{method="POST",status="200"} 3',
        "# HELP tunebook_restarts_total Restarts.",
        "# TYPE tunebook_restarts_total counter",
        "tunebook_restarts_total 0",
        "# HELP tunebook_sessions Sessions\\nalive \\\\ running.",
        "# TYPE tunebook_sessions gauge",
        'tunebook_sessions{status="a \\"b\\" \\\\ c\\nd"} 2.5',
        "# HELP tunebook_wait_seconds Waits.",
        "# TYPE tunebook_wait_seconds histogram",
        'tunebook_wait_seconds_bucket{le="0.1"} 2',
        'tunebook_wait_seconds_bucket{le="1"} 3',
        'tunebook_wait_seconds_bucket{le="+Inf"} 4',
        "tunebook_wait_seconds_sum 7.6500000000000004",
        "tunebook_wait_seconds_count 4",
    ]


def test_a_histogram_with_labels():
    waits = Histogram("waits", "Waits.", ["kind"], bounds=[1])
    waits.observe(0.5, kind="a")
    waits.observe(2.0, kind="b")
    lines = list(waits.lines())[2:]
    assert lines[0] == 'waits_bucket{kind="a",le="1"} 1'
    assert lines[4] == 'waits_bucket{kind="b",le="1"} 0'
    assert lines[-1] == 'waits_count{kind="b"} 1'


def test_values_that_are_not_finite():
    gauge = Gauge("loss", "Loss.", ["which"])
    gauge.set(float("nan"), which="a")
    gauge.set(float("inf"), which="b")
    gauge.set(float("-inf"), which="c")
    assert [line.split()[-1] for line in gauge.lines()][-3:] == ["NaN", "+Inf", "-Inf"]


def test_misuse_is_said():
    counter = Counter("steps_total", "Steps.", ["session"])
    with pytest.raises(AssertionError, match="steps_total has the labels"):
        counter.add(kind="a")
    with pytest.raises(AssertionError, match="is a counter"):
        counter.add(-1, session="a")
    with pytest.raises(AssertionError, match="bounds have to rise"):
        Histogram("waits", "Waits.", bounds=[1, 0.5])


def test_several_threads_lose_nothing():
    counter = Counter("total", "All.")
    waits = Histogram("waits", "Waits.", bounds=[1])

    def work():
        for _ in range(5000):
            counter.add()
            waits.observe(0.5)
            list(waits.lines())[:1]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(counter.lines())[-1] == "total 20000"
    assert list(waits.lines())[-1] == "waits_count 20000"
