"""Progress, and errors for people."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from tunebook import display
from tunebook.display import (
    counting,
    duration_text,
    headlines,
    make_console,
    progress_display,
    report_error,
    tunebook_command,
)
from tunebook.errors import ConfigError, DataError, NonFiniteError

RUN = """
import sys
from tunebook.display import progress_display
every = int(sys.argv[1])
with progress_display(200, log_every=10) as progress:
    for step in range(1, 201):
        progress.step(step, loss=1.0 / step, tokens=100, seconds=0.5)
        if step % every == 0:
            progress.evaluation(step, {"eval/loss": 2.0 / step})
    progress.note("done \\u2588 [x]")
"""


def in_a_pipe(every: int, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(every)],
        capture_output=True,
        check=True,
        timeout=60,
        env={
            **{k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE")},
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environ,
        },
    )
    return done.stdout.decode()


@pytest.mark.parametrize("every", [100, 10, 1])
def test_without_a_terminal_200_steps_print_few_plain_lines(every: int) -> None:
    text = in_a_pipe(every, COLUMNS="20")
    lines = text.splitlines()
    assert len(lines) <= 200 // 10 + 20
    assert "\r" not in text and "\x1b" not in text
    assert lines[0].startswith("step 1/200  loss 1.0000")
    assert any(line.startswith("step 200/200  loss 0.0050") for line in lines)
    (tenth,) = (line for line in lines if line.startswith("step 10/200  loss 0.1000"))
    assert tenth.endswith("200 tokens/s  1 min 35 s left")
    shown = {int(step) for step in re.findall(r"step (\d+)/200  eval/loss", text)}
    shown |= {int(step) for step in re.findall(r"eval/loss [\d.]+ @ (\d+)", text)}
    assert not re.search(r"step (\d+)/200  eval/loss [\d.]+ @ ", text)
    assert 200 in shown
    assert len(shown) >= {100: 2, 10: 20, 1: 34}[every]
    assert "done █ [x]" in lines


def test_a_stream_without_the_characters_prints_question_marks() -> None:
    text = in_a_pipe(100, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert "done ? [x]" in text


def test_a_terminal_gets_one_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with progress_display(50, done=10, console=console) as progress:
        progress.step(11, loss=0.25, tokens=100, seconds=0.1)
        progress.evaluation(11, {"eval/loss": 0.5})
        progress.note("a [note]")
        progress.step(12, loss=0.125, tokens=100, seconds=0.1)
    text = stream.getvalue()
    assert "12/50" in text and "loss 0.1250" in text and "eval/loss 0.5000 @ 11" in text
    assert "1,000 tokens/s" in text and "3.8 s left" in text
    assert "a [note]" in text


LIVE = """
from tunebook.display import progress_display
with progress_display(76, done=0) as progress:
    for step in range(1, 77):
        progress.step(step, loss=0.0527, tokens=12345, seconds=3.1)
        progress.evaluation(step, {"eval/loss": 0.0527, "eval/perplexity": 1.05, "eval/num_x": 3})
"""


def in_a_terminal(script: str, columns: int) -> list[str]:
    """The lines that a process writes to a pseudo-terminal, without control sequences."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environ.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, env=environ
    )
    os.close(slave)
    written = b""
    try:
        while data := os.read(master, 65536):
            written += data
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(master)
    assert process.wait(timeout=60) == 0, written.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (120, ["76/76", "loss 0.0527", "eval/loss 0.0527 @ 76", "3,982 tokens/s"]),
        (80, ["76/76", "loss 0.0527", "eval/loss 0.0527 @ 76"]),
        (50, ["76/76", "loss 0.0527"]),
        (20, []),
    ],
)
def test_the_bar_takes_one_line_of_any_terminal(columns: int, parts: list[str]) -> None:
    lines = in_a_terminal(LIVE, columns)
    assert max(map(len, lines)) <= columns
    assert all(line.startswith("s") for line in lines)
    assert [part for part in parts if part not in lines[-1]] == []
    assert "perplexity" not in "".join(lines)


def test_headlines_stand_beside_the_loss() -> None:
    """What a preference run is about; the other metrics stay in metrics.jsonl."""
    metrics = {"train/loss": 0.5, "train/accuracy": 0.75, "train/margin": 0.25, "train/kl": 1.0}
    assert headlines(metrics, "train/") == {"accuracy": 0.75, "margin": 0.25}
    stream = io.StringIO()
    with progress_display(2, console=Console(file=stream, width=200)) as progress:
        progress.step(1, loss=0.5, others=headlines(metrics, "train/"), tokens=10, seconds=1.0)
        progress.evaluation(1, {"eval/loss": 0.4, "eval/accuracy": 1.0, "eval/kl": 3.0})
        progress.evaluation(2, {"eval/worst": 0.1, "eval/num_tokens": 7.0})
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("step 1/2  loss 0.5000  accuracy 0.7500  margin 0.2500  10 tokens/s")
    assert second == "step 1/2  eval/loss 0.4000  eval/accuracy 1.0000"
    assert third == "step 2/2  eval/worst 0.1000"


PAIRS_LIVE = """
from tunebook.display import counting, progress_display
with progress_display(48, done=0) as progress:
    with counting("scoring with the reference policy") as count:
        for done in range(0, 801, 100):
            count(done, 800)
    progress.step(1, loss=0.6931, others={"accuracy": 0.5, "margin": 0.0}, tokens=900, seconds=0.1)
"""


@pytest.mark.parametrize("columns", [120, 80])
def test_a_count_inside_a_display_is_shown_in_it(columns: int) -> None:
    """A terminal has room for one display: two at a time would be an error of rich."""
    lines = in_a_terminal(PAIRS_LIVE, columns)
    assert max(map(len, lines)) <= columns
    assert any("scoring" in line for line in lines)
    assert "loss 0.6931" in lines[-1] and "accuracy 0.5000" in lines[-1]
    assert "scoring" not in lines[-1]


def test_without_a_terminal_a_count_says_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every few seconds, and none for a count that is over before."""
    stream = io.StringIO()
    with progress_display(3, console=Console(file=stream)), counting("scoring") as count:
        for done in range(1, 11):
            count(done, 10)
    assert stream.getvalue() == ""
    monkeypatch.setattr(display, "COUNT_EVERY_S", 0.0)
    with progress_display(3, console=Console(file=stream)), counting("scoring") as count:
        for done in (1, 2):
            count(done, 2)
    assert stream.getvalue().splitlines() == ["scoring 1/2", "scoring 2/2"]


def test_an_error_in_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    message = "many words " * 40 + "end\n  second line"
    report_error(ConfigError(message))
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_error_on_a_terminal_is_wrapped() -> None:
    script = """
from tunebook.display import report_error
from tunebook.errors import ConfigError
report_error(ConfigError("many words " * 40))
"""
    lines = in_a_terminal(script, 60)
    assert len(lines) > 5 and max(map(len, lines)) <= 60


def test_the_command_is_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin = tmp_path / "project" / ".venv" / "bin"
    bin.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(bin / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert tunebook_command() == f"{bin}/python -m tunebook.cli"
    monkeypatch.chdir(tmp_path / "project")
    assert tunebook_command() == ".venv/bin/python -m tunebook.cli"
    script = bin / "tunebook"
    script.touch(mode=0o755)
    assert tunebook_command() == ".venv/bin/tunebook"
    monkeypatch.chdir(bin)
    assert tunebook_command() == "./tunebook"
    monkeypatch.chdir(os.path.dirname(__file__))
    assert tunebook_command() == str(script)
    monkeypatch.setenv("PATH", str(bin))
    assert tunebook_command() == "tunebook"
    other = tmp_path / "other"
    other.mkdir()
    (other / "tunebook").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{bin}")
    assert tunebook_command() == str(script)


def test_a_bar_is_taken_down_by_an_exception() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt), progress_display(5, console=console):
        raise KeyboardInterrupt
    assert console._live_stack == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (10.2, "10 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3900, "1 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("optimizer.lr=1: no such key; did you mean optimizer.learning_rate?"), 2),
        (DataError("rows.jsonl:3: not JSON"), 2),
        (NonFiniteError("the loss is NaN"), 1),
    ],
)
def test_an_expected_error_is_one_paragraph(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"
    assert "Traceback" not in err


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ConfigError("wrong") from KeyError("cause")
    except ConfigError as error:
        report_error(error, debug=True)
        first = capsys.readouterr().err
        monkeypatch.setenv("TUNEBOOK_DEBUG", "1")
        report_error(error)
        second = capsys.readouterr().err
        monkeypatch.setenv("TUNEBOOK_DEBUG", "0")
        report_error(error)
        third = capsys.readouterr().err
    for text in (first, second):
        assert "Traceback" in text and "cause" in text
        assert text.rstrip().endswith("error: wrong")
    assert "Traceback" not in third


def test_an_unexpected_error_shows_its_traceback_redacted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "sentinel-value")
    error = ZeroDivisionError("with sentinel-value")
    error.add_note("and a note")
    assert report_error(error) == 1
    text = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: with [redacted]" in text and "and a note" in text
    assert "sentinel-value" not in text


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    make_console(stream).print("[red]x")
    assert "31m" not in stream.getvalue()


UNREAD = """
import sys
from tunebook.display import make_console, progress_display, report_error
from tunebook.errors import ConfigError
sys.stdin.read()
with progress_display(2) as progress:
    progress.step(1, tokens=1, seconds=1.0)
    progress.note("lost")
make_console().print("lost too")
sys.exit(report_error(ConfigError("and this")))
"""


def test_a_reader_that_goes_away_changes_no_exit_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=60) == ConfigError.exit_code == 2
