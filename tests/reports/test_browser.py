"""The pages in a real browser, where one is installed: no error, nothing cut off, light and dark."""

import json
import shutil
import struct
import subprocess
import zlib

import pytest

from tests.reports.made import finish, made_sweep, planned_run
from tunebook.reports.run_page import write_run_report
from tunebook.reports.sweep_page import write_sweep_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is there")
WIDE, NARROW = 1280, 390


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sweep = made_sweep(folder, rates=(1e-4, 1e-3), ranks=(4,))
    for trial in sweep.trials:
        object.__setattr__(trial, "label", f"data.path={'long/' * 20}rows.jsonl a_{'b' * 80}")
    return {
        "run": write_run_report(finish(planned_run(folder))),
        "sweep": write_sweep_report(sweep),
    }


def browse(page, folder, *arguments, width):
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
             "--v=0", f"--user-data-dir={folder}", f"--window-size={width},1600")  # fmt: skip
    done = subprocess.run(
        [BROWSER, *flags, *arguments, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def pixels(path):
    """Bytes of the rows of a PNG of 8-bit RGB or RGBA, unfiltered enough to look at the first."""
    data = path.read_bytes()
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and colour in (2, 6)
    packed, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    raw = zlib.decompress(packed)
    return width, height, raw[1:4]


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_page_is_drawn_light_and_dark_and_is_never_wider_than_the_window(pages, tmp_path, name):
    page, backs = pages[name], []
    for scheme in ("light", "dark"):
        picture = tmp_path / f"{scheme}.png"
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        browse(page, tmp_path / "profile", f"--screenshot={picture}", *dark, width=WIDE)
        width, _, first = pixels(picture)
        assert width == WIDE
        backs.append(sum(first))
    assert backs[0] == 3 * 255 and backs[1] < 3 * 60
    measured = page.with_name("measured.html")
    script = (
        "<script>document.title = JSON.stringify([document.documentElement.scrollWidth,"
        " innerWidth, document.querySelectorAll('svg').length])</script></body>"
    )
    measured.write_text(
        page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8"
    )
    dom = browse(measured, tmp_path / "profile", "--dump-dom", width=NARROW)
    title = dom.partition("<title>")[2].partition("</title>")[0]
    scroll_width, window_width, num_charts = json.loads(title)
    assert scroll_width <= window_width and num_charts >= 2
