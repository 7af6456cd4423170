"""What each process of a launch does: process 0 runs the program, the others serve it."""

import signal
import sys
import time
import traceback
from collections.abc import Callable

from tunebook.backends.local.distributed.member import Member
from tunebook.backends.local.distributed.team import NOTE_WAIT_S, Team, is_lost_connection
from tunebook.errors import BackendError, TunebookError

LAST_WORDS_S = 2.0
"""How long the others stay after process 0 has ended badly, so that it leaves first."""

_members: list[Member] = []


def run_together(run: Callable[[], int]) -> int:
    """The exit code of this process: `run` in process 0, while the others compute with it.

    Args:
        run: the program; it finds the others when it opens a `ShardedBackend`.
    """
    team = Team()
    member = Member(team)
    if not team.leads:
        return _serve(team, member)
    code = 1
    _members.append(member)
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        _members.clear()
        # Before the others end: their launcher may then end this process at once.
        sys.stdout.flush()
        sys.stderr.flush()
        team.end(code)
        if not team.broken:
            team.disconnect()
    return code


def current_member() -> Member:
    """The member of this launch.

    Raises:
        BackendError: the program was not started by `run_together`.
    """
    if not _members:
        raise BackendError(
            "several processes were started, but the program was not given to "
            "tunebook.backends.local.distributed.run_together; `python -m recipes.<recipe>` does so"
        )
    return _members[0]


def _serve(team: Team, member: Member) -> int:
    # A stop is for process 0 to decide, which finishes its step with our help; a launcher that
    # means it kills.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "" not in sys.path:  # as process 0, which looks for a user's functions where it stands
        sys.path.insert(0, "")
    try:
        code = team.follow(member.run)
    except BaseException as error:
        _report(team, error)
        return 1
    team.disconnect()
    if code != 0:
        time.sleep(LAST_WORDS_S)
    return code


def _report(team: Team, error: BaseException) -> None:
    """Says what ended this process, unless another one does."""
    if is_lost_connection(error):
        if team.failure_note(NOTE_WAIT_S) is None:
            print(f"process {team.rank}: process 0 is gone, or another one", file=sys.stderr)
        return
    if not isinstance(error, TunebookError):
        traceback.print_exception(error)
    kind = "" if isinstance(error, TunebookError) else f"{type(error).__name__}: "
    team.note_failure(f"process {team.rank} of {team.size} failed: {kind}{error}")
