"""Charts as SVG."""

from xml.etree import ElementTree

import pytest

from tunebook.reports.charts import Chart, Series, Style
from tunebook.reports.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, number_text, svg_of


def drawn(points, **options):
    style = options.pop("style", Style.LINE)
    chart = Chart("x", "loss", [Series("train <loss>", points, style, 0)], **options)
    return ElementTree.fromstring(svg_of(chart))


def placed(svg):
    [line] = [each for each in svg.iter("polyline")]
    return [tuple(map(float, each.split(","))) for each in line.get("points").split()]


def ticks(svg):
    return [each.text for each in svg.iter("text")]


def test_a_falling_line_falls_from_the_left_to_the_right():
    points = placed(drawn([(0, 3.0), (10, 2.0), (20, 1.0)]))
    assert points[0][0] == LEFT and points[-1][0] == WIDTH - RIGHT
    assert points[1][0] == pytest.approx((LEFT + WIDTH - RIGHT) / 2)
    assert points[0][1] < points[1][1] < points[2][1]
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in points)


@pytest.mark.parametrize(
    "points",
    [
        [(1, 2.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, -5.0), (2, -5.0)],
        [(n, float(n % 7)) for n in range(5000)],
        [(1, 1e-9), (2, 2e-9)],
        [(1, 1e12), (2, -1e12)],
    ],
)
@pytest.mark.parametrize("style", list(Style))
def test_odd_points_stay_on_the_drawing(points, style):
    svg = drawn(points, style=style)
    circles = [(float(each.get("cx")), float(each.get("cy"))) for each in svg.iter("circle")]
    lines = placed(svg) if list(svg.iter("polyline")) else []
    for x, y in [*circles, *lines]:
        assert LEFT - 1 <= x <= WIDTH and TOP - 1 <= y <= HEIGHT - BOTTOM + 1
    assert len(ElementTree.tostring(svg)) < 2_000_000
    assert len(circles) == (
        len(points) if style in (Style.MARKED, Style.DOTS, Style.STAR) else len(points) == 1
    )


def test_a_logarithmic_axis_spaces_ratios_equally():
    svg = drawn([(1e-4, 1.0), (1e-3, 1.0), (1e-2, 1.0)], x_is_log=True)
    first, second, third = (x for x, _ in placed(svg))
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert {"0.0001", "0.001", "0.01"} <= set(ticks(svg))


def test_ticks_are_round():
    assert [t for t in ticks(drawn([(0, 0.0), (100, 1.0)])) if t != "step"] == [
        "0", "0.25", "0.5", "0.75", "1", "0", "25", "50", "75", "100",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.1, "0.1"), (1e-4, "0.0001"), (2.5e-5, "2.5e-5"), (1234, "1,234"), (3e7, "3e7"),
     (12.3456, "12.35"), (-0.5, "-0.5")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_steps_are_whole():
    few = ticks(drawn([(0, 0.0), (3, 1.0)]))
    assert few[-5:-1] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.69313, 0.69317, ["0.69313", "0.69314", "0.69315", "0.69316", "0.69317"]),
        (12345.1, 12345.4, ["12,345.1", "12,345.2", "12,345.3", "12,345.4"]),
        (1e-4, 3e-4, ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003"]),
    ],
)
def test_numbers_beside_an_axis_tell_its_ticks_apart(low, high, texts):
    found = ticks(drawn([(1, low), (2, high)]))
    assert [text for text in found if text in texts] == texts
    assert len(set(found[:4])) == 4


@pytest.mark.parametrize("from_zero", [True, False])
def test_what_is_always_nothing_lies_on_the_ground(from_zero):
    svg = drawn([(1, 0.0), (2, 0.0)], from_zero=from_zero)
    assert [y for _, y in placed(svg)] == [HEIGHT - BOTTOM] * 2
    assert "0" in ticks(svg) and not any(text.startswith("-") for text in ticks(svg))


def test_values_that_were_tried_close_together_do_not_run_into_each_other():
    points = [(rate, 1.0) for rate in (1e-4, 2e-4, 3e-4, 4e-4, 5e-4)]
    found = ticks(drawn(points, style=Style.DOTS, x_is_log=True))
    assert "0.0005" in found and "0.0004" not in found


def test_names_are_escaped():
    assert "train &lt;loss&gt;" in svg_of(
        Chart("x", "loss", [Series("train <loss>", [(1, 1.0)], Style.DOTS, 0)])
    )
