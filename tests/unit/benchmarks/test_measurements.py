"""The page of measurements: made from its file alone, run by run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import measurements
import pytest
from measurements import (
    PAGE,
    RUNS,
    Machine,
    MeasuredRun,
    merge,
    read_runs,
    render,
    rows_of,
    write_runs,
)
from report import Figure, as_documents

MACHINE = Machine(2, "Some CPU @ 3 GHz", "Linux 6.1")


def run(command: str, *values: float, date: str = "2026-01-02") -> MeasuredRun:
    figures = [Figure(f"case {number}", value, "/s") for number, value in enumerate(values)]
    return MeasuredRun(command, date, MACHINE, rows_of(as_documents(figures)))


def test_the_page_is_that_of_the_file() -> None:
    assert (measurements.DOCS / PAGE).read_text() == render(read_runs(measurements.DOCS))


def test_a_figure_is_one_row() -> None:
    figure = Figure("POST, a|b", 42_345.678, "msg/s", p50_ms=0.51234, ratios={"hello": 0.75})
    figure.demand("≥ 60,000/s", False)
    figure.note = "first\nsecond"
    other = Figure("memory", 24.5, "B/msg", p50_ms=None)
    page = render(
        [
            MeasuredRun(
                "scripts/bench", "2026-01-02", MACHINE, rows_of(as_documents([figure, other]))
            )
        ]
    )
    assert page.endswith(
        """
## `scripts/bench`

2026-01-02, 2 cores of Some CPU @ 3 GHz, Linux 6.1.

| figure | value | p50 ms | × hello | level | note |
| --- | --- | --- | --- | --- | --- |
| POST, a\\|b | 42,346 msg/s | 0.51 | 0.75 | ≥ 60,000/s: missed | first second |
| memory | 24.50 B/msg |  |  |  |  |
"""
    )


def test_another_run_of_a_command_takes_its_place() -> None:
    runs = merge([run("b", 1), run("a", 2)], run("b", 3, 4))
    assert [(each.command, len(each.rows)) for each in runs] == [("a", 1), ("b", 2)]
    assert runs == merge(merge([], run("b", 3, 4)), run("a", 2))


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    runs = [run("a", 1.5, 100_009), run("b", 2)]
    write_runs(tmp_path, runs)
    assert read_runs(tmp_path) == runs
    assert (tmp_path / PAGE).read_text() == render(runs)
    assert render(runs).count("\n## ") == 2


def test_counts_are_kept_exactly() -> None:
    rows = rows_of([{"case": "cycles", "value": 1_000_009, "unit": ""}])
    rows += rows_of([{"case": "violations", "value": 0, "unit": ""}])
    page = render([MeasuredRun("a", "2026-01-02", MACHINE, rows)])
    assert page.endswith("| cycles | 1,000,009 |\n| violations | 0 |\n")


def test_this_machine_has_a_name() -> None:
    machine = measurements.this_machine()
    assert machine.cores > 0
    assert machine.processor
    assert machine.kernel.startswith("Linux ")


# ── the command ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs that were run; each reports one figure, and `fails` fails."""
    ran: list[list[str]] = []

    class Done:
        def __init__(self, command: Sequence[str], **options: object) -> None:
            self.returncode = int("peers" in command)
            ran.append([str(Path(command[0]).name), *command[1:-2]])
            figures = as_documents([Figure("case", 1.0, "/s")])
            Path(command[-1]).write_text(json.dumps({"figures": figures}))

    monkeypatch.setattr("measurements.subprocess.run", Done)
    monkeypatch.setattr(measurements, "DOCS", tmp_path)
    return ran


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measurements", *words])
    return measurements.main()


def test_what_is_named_is_run_and_written_down(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bench(monkeypatch, "levels", "crash", "--minutes", "3") == 0
    assert commands == [["bench", "levels", "--minutes", "3"], ["crash", "--minutes", "3"]]
    assert bench(monkeypatch, "simulation") == 0
    assert commands[2][1:] == ["-m", "tests.world"]
    assert [one["command"] for one in json.loads((tmp_path / RUNS).read_text())["runs"]] == [
        "python -m tests.world",
        "scripts/bench levels --minutes 3",
        "scripts/crash --minutes 3",
    ]


def test_without_a_name_all_benchmarks_are_run_and_what_fails_is_left_out(
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(monkeypatch, "--quick") == 1
    assert commands == [["bench", name, "--quick"] for name in measurements.BENCHMARKS]
    assert "scripts/bench peers --quick: status 1" in capsys.readouterr().err
    assert len(read_runs(tmp_path)) == len(commands) - 1


def test_an_unknown_name_is_refused(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="there is no core"):
        bench(monkeypatch, "levels", "core")
    assert not commands
