"""docs/measurements.md: what was measured, by which command, on which machine and when.

    scripts/bench --docs [NAME ...] [options of those]
    scripts/bench --docs levels --full
    scripts/bench --docs crash --minutes 10
    scripts/bench --docs simulation --cycles 100000 --jobs 2
    scripts/bench --docs tampering --runs 10000 --jobs 2

Runs what is named, one after the other, and writes its figures down: into measurements.json, which
keeps the runs, and from that alone into the page. A run takes the place of an earlier one of the
same command; what other commands measured stays. Without a name, all benchmarks are run, and the
options go to each. Besides the benchmarks there are `crash` (scripts/crash), `soak` (scripts/soak),
`simulation` (python -m tests.world) and `tampering` (… .tampering). A run that fails, or
whose counts do not agree, is left out.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from report import rounded
from servers import ROOT

DOCS = ROOT / "docs"
PAGE = "measurements.md"
RUNS = "measurements.json"
BENCHMARKS = (
    "levels",
    "timers",
    "purgatory",
    "schedules",
    "console",
    "lanes",
    "peers",
    "shards",
    "cluster",
    "sinks",
    "bulk",
    "pipeline",
    "spread",
    "billion",
)
OTHERS = {
    "client": ("scripts/bench", "client"),
    "turns": ("scripts/bench", "turns"),
    "crash": ("scripts/crash",),
    "soak": ("scripts/soak",),
    "simulation": ("python", "-m", "tests.world"),
    "tampering": ("python", "-m", "tests.world.tampering"),
}
"""What is run only if it is named; `client` is a part of `levels`."""

HEAD = """\
# Measurements

`scripts/bench --docs` writes this page from `measurements.json`; nobody edits it. Each section is
one run of one command, with the day and the machine; another run of the command takes its place.
Load generators share the machine with the server, so compare ratios rather than rates between
machines.
"""
COLUMNS = {
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "max_ms": "max ms",
    "cpu_us": "CPU µs",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cores: int
    processor: str
    kernel: str


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run of a command. Each of `rows` has the `case`, `value` and `unit` of a figure, and of
    its other fields (`report.Figure`) those that are set."""

    command: str
    date: str
    machine: Machine
    rows: list[dict[str, Any]] = field(default_factory=list)


def this_machine() -> Machine:
    """The machine that this runs on."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            processor = " ".join(value.split())
            break
    return Machine(os.cpu_count() or 1, processor, f"{platform.system()} {platform.release()}")


# ---- the file ----------------------------------------------------------------------------------


def read_runs(directory: Path) -> list[MeasuredRun]:
    """The runs that are written down; none if there is no file."""
    path = directory / RUNS
    documents = json.loads(path.read_text())["runs"] if path.exists() else []
    return [MeasuredRun(**{**each, "machine": Machine(**each["machine"])}) for each in documents]


def merge(runs: Sequence[MeasuredRun], new: MeasuredRun) -> list[MeasuredRun]:
    """All runs, by their commands, with the new one in the place of one of the same command."""
    kept = {run.command: run for run in (*runs, new)}
    return [kept[command] for command in sorted(kept)]


def write_runs(directory: Path, runs: Sequence[MeasuredRun]) -> None:
    """The file, and the page that is made from it."""
    directory.mkdir(exist_ok=True)
    document = {"runs": [asdict(run) for run in runs]}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (directory / RUNS).write_text(text + "\n")
    (directory / PAGE).write_text(render(runs))


def rows_of(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of figures (`report.as_documents`): what is set, with five digits."""
    names = ("case", "value", "unit", *COLUMNS, "ratios", "level", "verdict", "note")
    return [
        {
            name: _short(figure[name])
            for name in names
            if figure.get(name) not in (None, "", {}) or name in ("value", "unit")
        }
        for figure in figures
    ]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- the page ----------------------------------------------------------------------------------


def render(runs: Sequence[MeasuredRun]) -> str:
    """The page."""
    return "\n".join([HEAD, *map(_section, runs)])


def _section(run: MeasuredRun) -> str:
    ratios = list(dict.fromkeys(name for row in run.rows for name in row.get("ratios", ())))
    columns = {
        "figure": [row["case"] for row in run.rows],
        "value": [f"{rounded(row['value'])} {row['unit']}".strip() for row in run.rows],
        **{title: [rounded(row.get(name)) for row in run.rows] for name, title in COLUMNS.items()},
        **{
            f"× {name}": [rounded(row.get("ratios", {}).get(name)) for row in run.rows]
            for name in ratios
        },
        "level": [
            f"{row['level']}: {row['verdict']}" if row.get("level") else "" for row in run.rows
        ],
        "note": [row.get("note", "") for row in run.rows],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    machine = run.machine
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    return (
        f"## `{run.command}`\n\n"
        f"{run.date}, {cores} of {machine.processor}, {machine.kernel}.\n\n{table}\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# ---- the command -------------------------------------------------------------------------------


def measure(name: str, options: Sequence[str]) -> MeasuredRun | None:
    """MeasuredRun what goes by that name; None: it failed."""
    words = (*OTHERS.get(name, ("scripts/bench", name)), *options)
    program = sys.executable if words[0] == "python" else str(ROOT / words[0])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        status = subprocess.run(
            [program, *words[1:], "--json", str(path)], cwd=ROOT, check=False
        ).returncode
        if status or not path.exists():
            print(f"{shlex.join(words)}: status {status}, not written down", file=sys.stderr)
            return None
        figures = json.loads(path.read_text())["figures"]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return MeasuredRun(shlex.join(words), today, this_machine(), rows_of(figures))


def main() -> int:
    """Exit status 1: something failed; what did not is written down."""
    words = sys.argv[1:]
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    known = (*BENCHMARKS, *OTHERS)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    complete = True
    for name in names or BENCHMARKS:
        run = measure(name, options)
        if run is None:
            complete = False
        else:
            write_runs(DOCS, merge(read_runs(DOCS), run))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
