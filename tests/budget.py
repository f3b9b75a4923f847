"""The budget of the tests: `tests/BUDGET.md` says what each file took, and what a run may take.

`scripts/test --report` writes the page anew after a run. Every other run of tiers is compared with
it: the end of the run names the files that grew most. That is a report and no failure, since a time
on a shared machine is noise, even of a processor.

A page has two figures for each file: of the default tier, and of the whole file. A run fills in
those that it has measured, and leaves the others as they were.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import depth
from tests.accounting import Times
from tests.tiers import TIERS, tier_of

PAGE = Path(__file__).parent / "BUDGET.md"
DEFAULT_MAX_S: Final = 700
ALL_MAX_S: Final = 2400
"""An issue may add 120 s and 360 s, a minute and three minutes of two cores, unless it names other
figures. Its change raises these."""
FOLDER_MAX_S: Final = 1150
"""The default tier with the tiers of one folder: ten minutes of two cores, but for what waits."""
GROWN_MIN_S = 2.0
"""A file that grew by less is not named."""
SHOWN_MAX = 8
FEW = 25
"""So many fixtures are listed: the dearest."""

_ROW = re.compile(r"^\| `(tests/[\w/]+\.py)` \| ([\d.]*) \| ([\d.]*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """Processor time of a file in seconds; None: nobody has measured it."""

    default_s: float | None = None
    whole_s: float | None = None

    def of(self, is_whole: bool) -> float | None:
        return self.whole_s if is_whole else self.default_s


def read(text: str) -> dict[str, Figures]:
    """The figures of a page, by file."""
    return {
        file: Figures(float(default) if default else None, float(whole) if whole else None)
        for file, default, whole in _ROW.findall(text)
    }


def grown(times: Times, known: Mapping[str, Figures], whole: set[str]) -> Iterator[str]:
    """A line for each file that took much more than the page says, the worst first.

    `whole` has the names of the tiers that ran whole."""
    found = []
    for file, took in times.files.items():
        before_s = known.get(file, Figures(0.0, 0.0)).of(tier_of(file).name in whole)
        if before_s is None:
            continue  # Nobody has measured it.
        if took.processor_s > before_s + GROWN_MIN_S:
            found.append((took.processor_s - before_s, file, took.processor_s, before_s))
    for _, file, now_s, before_s in sorted(found, reverse=True)[:SHOWN_MAX]:
        yield f"{file}: {now_s:.1f} s of processor, {before_s:.1f} s in {PAGE.name}"


def write(times: Times, text: str, whole: set[str]) -> str:
    """The page after a run, from the page before it."""
    known = {file: one for file, one in read(text).items() if (PAGE.parents[1] / file).is_file()}
    for file, took in times.files.items():
        before, now_s = known.get(file, Figures()), round(took.processor_s, 1)
        tier = tier_of(file)
        is_always_whole = tier.always is None and not tier.is_sampled
        is_whole = is_always_whole or tier.name in whole
        is_default = is_always_whole or tier.name not in whole
        known[file] = Figures(
            now_s if is_default else before.default_s, now_s if is_whole else before.whole_s
        )
    return "\n".join([*_head(known), *_kinds(times), *_fixtures(times), *_files(known)]) + "\n"


def _whole() -> set[str]:
    return {tier.name for tier in TIERS if depth.is_whole(tier.name)}


def compare(times: Times) -> Iterator[str]:
    """Lines for the end of a run."""
    whole = _whole()
    took_s = times.processor_s
    yield f"{took_s:.0f} s of processor; tests/{PAGE.name} says what each file took before."
    yield from grown(times, read(PAGE.read_text("utf-8")), whole)


def write_page(times: Times) -> Iterator[str]:
    """Write the page anew; what the end of that run tells."""
    if not times.is_whole:
        yield f"tests/{PAGE.name} is not written: not all tests of the chosen files have run."
        return
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    PAGE.write_text(write(times, text, _whole()), "utf-8")
    yield f"{times.processor_s:.0f} s of processor; tests/{PAGE.name} is written."


def tier_sums(known: Mapping[str, Figures]) -> dict[str, list[float]]:
    """Seconds that each tier takes: in the default tier, and whole."""
    sums = {tier.name: [0.0, 0.0] for tier in TIERS}
    for file, one in known.items():
        for at, took_s in enumerate((one.default_s, one.whole_s)):
            sums[tier_of(file).name][at] += took_s or 0.0
    return sums


def _head(known: Mapping[str, Figures]) -> Iterator[str]:
    sums = tier_sums(known)
    default_s, whole_s = (sum(one[at] for one in sums.values()) for at in (0, 1))
    yield from (
        "# Processor time of the tests",
        "",
        "`scripts/test --report` writes this page after a run; do not edit it. The figures are",
        "seconds of processor time: of the workers of pytest, and of the servers, brokers, Sparks",
        "and browsers that a file starts. A broker that files share counts for the first of them.",
        "",
        f"The default tier takes {default_s:.0f} s and may take {DEFAULT_MAX_S} s; `--all` takes",
        f"{whole_s:.0f} s and may take {ALL_MAX_S} s. An issue may add 120 s and 360 s, a minute",
        "and three minutes of two cores, unless it names another figure. It raises the limits in",
        "`tests/budget.py` then.",
        "",
        "| tier | default | whole |",
        "|---|---|---|",
    )
    for tier in TIERS:
        yield f"| {tier.name} | {sums[tier.name][0]:.0f} | {sums[tier.name][1]:.0f} |"
    yield f"| all | {default_s:.0f} | {whole_s:.0f} |"


def _kinds(times: Times) -> Iterator[str]:
    workers_s = sum(one.worker_s for one in times.files.values())
    yield from (
        "",
        "## The last run, by kind of process",
        "",
        "| kind | processes | s |",
        "|---|---|---|",
    )
    yield f"| workers of pytest | | {workers_s:.0f} |"
    for kind, (count, took_s) in sorted(times.kinds.items(), key=lambda one: -one[1][1]):
        yield f"| {kind} | {count} | {took_s:.0f} |"


def _fixtures(times: Times) -> Iterator[str]:
    yield from (
        "",
        "## The last run, by fixture",
        "",
        "The time that tests waited for the fixture, and what the worker itself spent on it.",
        "",
        "| fixture | setups | waited, s | worker, s |",
        "|---|---|---|---|",
    )
    dearest = sorted(times.fixtures.items(), key=lambda one: -one[1].wall_s)[:FEW]
    for name, one in dearest:
        yield f"| `{name}` | {one.setups} | {one.wall_s:.0f} | {one.worker_s:.0f} |"


def _files(known: Mapping[str, Figures]) -> Iterator[str]:
    yield from ("", "## Files", "", "| file | default | whole |", "|---|---|---|")
    for file, one in sorted(known.items()):
        cells = (
            "" if took_s is None else f"{took_s:.1f}" for took_s in (one.default_s, one.whole_s)
        )
        yield f"| `{file}` | {' | '.join(cells)} |"
