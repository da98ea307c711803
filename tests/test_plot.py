"""The picture of a report: well-formed, with every series where its numbers belong."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from dsl.bench.axes import linear_ticks, log_ticks
from dsl.bench.measure import Ceilings, Machine
from dsl.bench.plot import ONLINE, OURS, plot, plot_svg
from dsl.bench.report import Beside, Report, Row, Shape

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine("A <fast> & new GPU", "sm90", 132, 1, "2.11.0", "3.6.0")
LIMITS = Ceilings(copy=4e12, matmul={"bf16": 8e14})


def beside(tflop: float, tb: float) -> Beside:
    return Beside("PASSED", "graph", 1.0, 1.0, tb, tflop)


def row(block: str, size: int, tflop: float = 0.0, tb: float = 0.0, family: str = "prefill", **more) -> Row:
    shape = Shape(family, "bf16", 16, 4, 128, 128, 1, 1 if family == "decode" else size, size)
    rates = {"tb_per_s": tb, "tflop_per_s": tflop}
    return Row("a.attn", block, f"1 seq, {size}", "PASSED", shape=shape, **rates, **more)


def report_of(*rows: Row) -> Report:
    return Report(MACHINE, LIMITS, rows, peers={"fa3": "a & b"})


def panels(text: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text.encode()).findall(f"{SVG}g[@class='panel']")


def series_of(panel: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its name, in pixels."""
    return {
        group.attrib["data-name"]: [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in group.find(f"{SVG}polyline").attrib["points"].split())  # type: ignore[union-attr]
        ]
        for group in panel.findall(f"{SVG}g[@class='series']")
    }


def frame_of(panel: ElementTree.Element) -> tuple[float, float, float, float]:
    frame = panel.find(f"{SVG}rect")
    assert frame is not None
    return tuple(float(frame.attrib[name]) for name in ("x", "y", "width", "height"))  # type: ignore[return-value]


def test_each_block_is_a_panel_with_a_line_for_each_that_was_timed():
    refused = Beside("LEFT_OUT", problem="takes sequences of one length only")
    text = plot_svg(
        report_of(
            row("first", 1000, 400, peers={"fa3": beside(300, 0), "cudnn": refused}, online=beside(350, 0)),
            row("first", 10000, 600, peers={"fa3": beside(650, 0), "cudnn": refused}),
            row("second", 500, tb=2.0, family="decode", peers={"vllm": beside(0, 1.0)}),
            Row("a.attn", "third", "1 seq", "RUNTIME_ERROR", problem="no"),
        )
    )
    first, second = panels(text)
    assert {name: len(points) for name, points in series_of(first).items()} == {OURS: 2, ONLINE: 1, "fa3": 2}
    assert set(series_of(second)) == {OURS, "vllm"}
    shown = ["".join(element.itertext()) for element in ElementTree.fromstring(text.encode()).iter(f"{SVG}text")]
    for expected in ("A <fast> & new GPU (sm90)", "matmul 800 TFLOP/s", "copy 4 TB/s", "first: 16/4 heads x 128, bf16"):
        assert expected in shown
    assert [name for name in (OURS, ONLINE, "fa3", "vllm", "cudnn") if name in shown] == [OURS, ONLINE, "fa3", "vllm"]
    assert "torch 2.11.0, Triton 3.6.0; fa3: a & b" in shown
    titles = [element.text for element in first.iter(f"{SVG}title")]
    assert "fa3: 650 TFLOP/s, 1 seq, 10000" in titles


def test_points_stand_where_their_numbers_are():
    rows = [row("small", size, rate) for size, rate in ((10000, 800.0), (100, 0.0), (1000, 400.0))]
    (panel,) = panels(plot_svg(report_of(*rows)))
    left, top, width, height = frame_of(panel)
    points = series_of(panel)[OURS]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2), "equal ratios are equal distances"
    assert y1 == pytest.approx(top + height, abs=0.1) and y2 == pytest.approx((y1 + y3) / 2, abs=0.1)
    assert all(left < x < left + width and top < y <= top + height for x, y in points)
    roof = panel.find(f"{SVG}g[@class='roof']/{SVG}line")
    assert roof is not None and roof.attrib["stroke-dasharray"]
    assert float(roof.attrib["y1"]) == float(roof.attrib["y2"]) == pytest.approx(y3)


def test_nothing_overlaps_or_leaves_the_picture():
    names = [f"block_{number}_{'x' * 55}" for number in range(5)]
    peers = {name: beside(500, 1) for name in ("cudnn", "fa2", "fa3", "fa4", "flashinfer", "flex", "another_peer")}
    placed = plot(report_of(*(row(name, 1000, 1e3, online=beside(900, 1), peers=peers) for name in names)))
    frames = [[float(value) for value in (panel.left, panel.top, panel.width, panel.height)] for panel in placed.panels]
    for place, (left, top, width, height) in enumerate(frames):
        assert left >= 0 and left + width <= placed.width and top >= 0 and top + height <= placed.height
        for other_left, other_top, *_ in frames[place + 1 :]:
            assert other_left >= left + width or other_top >= top + height
    below = max(float(key.y) for key in placed.keys)
    assert max(float(line.y) for line in placed.title) < min(float(key.y) for key in placed.keys)
    assert below < min(float(panel.title.y) for panel in placed.panels)
    assert all(
        len(panel.title.text) < 60 and "another_peer" in {key.label.text for key in placed.keys}
        for panel in placed.panels
    )


def test_a_report_without_times_is_an_empty_picture():
    assert panels(plot_svg(report_of())) == []


@pytest.mark.parametrize(("least", "most"), [(0.67, 1.5), (300, 100000), (11000, 46000), (1, 10**9), (9000, 11000)])
def test_ticks_of_the_log_axis(least: float, most: float):
    ticks = log_ticks(least, most)
    assert 1 <= len(ticks) <= 10 and all(least <= tick <= most and isinstance(tick, int) for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize("most", [0.05, 0.9, 4.8, 889.0, 1000.0, 1e5])
def test_ticks_of_the_linear_axis(most: float):
    ticks = linear_ticks(most)
    assert ticks[0] == 0 and 3 <= len(ticks) <= 7 and ticks[-1] <= most
    steps = {round(after - before, 12) for before, after in itertools.pairwise(ticks)}
    assert len(steps) == 1 and f"{steps.pop():e}"[0] in "125"
