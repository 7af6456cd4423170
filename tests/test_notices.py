"""What is shown and remembered, by which run."""

import logging
import threading
from collections import deque
from contextlib import ExitStack

import pytest

from tunebook.notices import Notes, notice, remembering
from tunebook.runs import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "sft", "noticed")


def noticed(run):
    return [(event["type"], event["text"]) for event in run.events() if "text" in event]


def test_a_notice_is_shown_and_an_event_of_the_run(run, caplog):
    notice("before", "nobody remembers this")
    with remembering(run):
        notice("resource", "resource 7 is READY", seconds=3)
        notice("loss_computed", "in two passes", shown=False)
    notice("after", "nor this")
    assert noticed(run) == [
        ("resource", "resource 7 is READY"),
        ("loss_computed", "in two passes"),
    ]
    assert run.events()[-2]["seconds"] == 3
    assert caplog.messages == ["nobody remembers this", "resource 7 is READY", "nor this"]


def test_runs_may_end_in_any_order(run, tmp_path):
    """As those of a sweep do: what the first of them leaves does not take the notices of the others."""
    other = RunDir.create(tmp_path, "sft", "other")
    with ExitStack() as first, remembering(other):
        first.enter_context(remembering(run))
        with remembering(RunDir.create(tmp_path, "sft", "third")):
            first.close()
            notice("retries", "3 requests were sent again", shown=False)
    notice("after", "nobody remembers this")
    assert noticed(run) == []
    assert noticed(other) == [("retries", "3 requests were sent again")]


def test_a_run_remembers_nothing_of_the_session_of_another(run, tmp_path):
    other = RunDir.create(tmp_path, "sft", "other")
    with remembering(run), remembering(other):
        notice("lost", "one", session=f"sft-{run.record.id}")
        notice("lost", "two", session=f"sft-{other.record.id}-reference")
        notice("lost", "three")
    assert noticed(run) == [("lost", "one"), ("lost", "three")]
    assert noticed(other) == [("lost", "two"), ("lost", "three")]


def test_without_any_set_up_it_shows_on_standard_error(run, monkeypatch, capsys):
    """As in a script or a notebook; pytest's own handlers are out of the way."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with remembering(run):
        notice("resource", "resource 7 is READY")
        notice("loss_computed", "in two passes", shown=False)
    assert capsys.readouterr().err == "resource 7 is READY\n"


def test_notes_of_other_threads_wait_until_somebody_says_them(run):
    notes = Notes()
    with remembering(run):
        thread = threading.Thread(target=notes.add, args=("recovering", "a new session"))
        thread.start()
        thread.join()
        assert noticed(run) == []
        notes.say()
        notes.say()
    assert noticed(run) == [("recovering", "a new session")]


def test_a_note_that_another_thread_has_just_said_is_no_error():
    class Emptied(deque):
        def __len__(self):
            return 1  # as it was before the other thread took the last one

    notes = Notes()
    notes._notes = Emptied()
    notes.say()
