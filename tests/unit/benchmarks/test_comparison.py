"""Ratios of a head to its base: above 1 is better, whatever the figure is; by rounds."""

from io import StringIO

import pytest
from levels.comparison import compare, show_comparison
from report import Figure
from rich.console import Console


@pytest.mark.parametrize(
    ("unit", "base", "head", "ratio"),
    [
        ("msg/s", 100.0, 120.0, 1.2),
        ("s", 1.0, 2.0, 0.5),
        ("B/msg", 24.0, 12.0, 2.0),
        ("µs CPU", 10.0, 20.0, 0.5),
    ],
)
def test_above_one_the_head_is_better(unit: str, base: float, head: float, ratio: float) -> None:
    (found,) = compare([Figure("case", base, unit)], [Figure("case", head, unit)])
    assert found.median == pytest.approx(ratio)


def test_of_deliveries_lateness_is_compared() -> None:
    base = Figure("pull, 1,000 due/s", 1000, "msg", p99_ms=6.0, cpu_us=10.0)
    head = Figure("pull, 1,000 due/s", 1000, "msg", p99_ms=4.0, cpu_us=20.0)
    (found,) = compare([base], [head])
    assert (found.median, found.p99, found.cpu) == (1.5, None, 0.5)


def test_the_median_of_the_rounds_is_what_is_said() -> None:
    base = [Figure("a", value, "/s", p99_ms=2.0) for value in (100, 200, 100)]
    head = [Figure("a", value, "/s", p99_ms=1.0) for value in (110, 100, 90)]
    (found,) = compare(base, head)
    assert found.rounds == [1.1, 0.5, 0.9]
    assert (found.median, found.p99) == (0.9, 2.0)


def test_what_one_side_lacks_or_is_wrong_is_left_out() -> None:
    wrong = Figure("wrong", 1, "/s", wrong=["accepted: 1, not 2"])
    nothing = Figure("nothing", 0, "MB")
    both = [wrong, nothing, Figure("both", 1, "/s")]
    ratios = compare([*both, Figure("gone", 1, "/s")], [*both, Figure("new", 1, "/s")])
    assert [ratio.case for ratio in ratios] == ["both"]


def test_each_level_has_its_ratio() -> None:
    base = [
        Figure("POST, 64 conn.", 100, "msg/s", group="post"),
        Figure("POST, 128 conn.", 100, "msg/s", group="post", cpu_us=10.0),
        Figure("restart after kill -9", 1.0, "s", group="restart"),
    ]
    head = [
        Figure("POST, 64 conn.", 200, "msg/s", group="post"),
        Figure("POST, 128 conn.", 50, "msg/s", group="post", cpu_us=5.0),
        Figure("restart after kill -9", 0.8, "s", group="restart"),
    ]
    output = StringIO()
    console = Console(width=160, file=output)
    show_comparison("A and B", base, head, compare(base, head), console)
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert ["post", "1.00", "2.00", "0.50", "POST,", "128", "conn."] in lines
    assert ["restart", "1.25", "1.25", "restart", "after", "kill", "-9"] in lines
