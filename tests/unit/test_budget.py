"""The page of what the tests take is written from a run, and a run is compared with it."""

from pathlib import Path

import pytest

from tests import budget
from tests.accounting import FileTimes, FixtureTimes, Process, Times
from tests.budget import Figures, grown, read, tier_sums, write
from tests.tiers import FOLDERS, TIERS

WHEEL = "tests/unit/schedule/test_wheel.py"
NODES = "tests/cluster/test_nodes.py"
FAULTS = "tests/simulation/test_faults.py"
REPAIR = "tests/simulation/test_repair.py"


def run(**files: float) -> Times:
    """A run in which these files took so long."""
    named = {"wheel": WHEEL, "nodes": NODES, "faults": FAULTS, "repair": REPAIR}
    times = Times(kinds={"server": (3, 4.5)}, fixtures={"api (tests)": FixtureTimes(2, 3.0, 1.0)})
    times.files.update({named[name]: FileTimes(took / 2) for name, took in files.items()})
    times.add_processes(
        Process(
            command="python -m delayserver serve", test=f"{named[name]}::test", processor_s=took / 2
        )
        for name, took in files.items()
    )
    return times


def test_a_page_is_read_as_it_was_written() -> None:
    text = write(run(wheel=1.0, nodes=40.0, faults=20.0), "", {"cluster"})
    assert read(text) == {
        WHEEL: Figures(1.0, 1.0),
        NODES: Figures(None, 40.0),
        FAULTS: Figures(20.0, None),
    }
    assert "| server | 6 | 35 |" in text and "| `api (tests)` | 2 | 3 | 1 |" in text
    assert "| cluster | 0 | 40 |" in text


def test_a_run_fills_in_what_it_has_measured() -> None:
    first = write(run(nodes=40.0, faults=90.0), "", {"cluster", "simulation"})
    second = write(run(faults=20.0), first, set())
    assert read(second) == {NODES: Figures(None, 40.0), FAULTS: Figures(20.0, 90.0)}


def test_a_file_that_is_gone_leaves_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = write(run(wheel=1.0), "", set())
    monkeypatch.setattr(budget, "PAGE", tmp_path / "tests" / "BUDGET.md")
    assert WHEEL not in read(write(run(), text, set()))


def test_a_run_that_did_not_end_leaves_the_page_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "PAGE", tmp_path / "BUDGET.md")
    times = run(wheel=1.0)
    times.is_whole = False
    assert "is not written" in "".join(budget.write_page(times))
    assert not budget.PAGE.exists()


def test_files_that_grew_are_named_the_worst_first() -> None:
    known = read(write(run(wheel=1.0, faults=20.0), "", set()))
    known[REPAIR] = Figures(None, 1.0)  # nobody has measured it as a sample
    lines = list(grown(run(wheel=2.9, faults=23.0, nodes=30.0, repair=9.0), known, set()))
    assert lines == [
        f"{NODES}: 30.0 s of processor, 0.0 s in BUDGET.md",
        f"{FAULTS}: 23.0 s of processor, 20.0 s in BUDGET.md",
    ]


def test_a_change_in_one_folder_keeps_the_budget() -> None:
    """The default tier, and whole the tiers of the folder. A change of the packages runs all."""
    sums = tier_sums(read(budget.PAGE.read_text("utf-8")))
    default_s = sum(one[0] for one in sums.values())
    for folder, whole in FOLDERS.items():
        took_s = default_s + sum(sums[name][1] - sums[name][0] for name in whole)
        assert took_s <= budget.FOLDER_MAX_S or len(whole) == len(TIERS), (folder, took_s)


def test_the_page_is_there_and_keeps_the_budget() -> None:
    known = read(budget.PAGE.read_text("utf-8"))
    assert WHEEL in known and NODES in known
    assert sum(one.default_s or 0.0 for one in known.values()) <= budget.DEFAULT_MAX_S
    assert sum(one.whole_s or 0.0 for one in known.values()) <= budget.ALL_MAX_S
