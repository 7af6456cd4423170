"""Progress, and errors for people."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from tunebook.display import duration_text, make_console, progress_display, report_error
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
    shown = {int(step) for step in re.findall(r"@ (\d+)", text)}
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
    assert err.replace("\n", " ").strip() == f"error: {error}"
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
