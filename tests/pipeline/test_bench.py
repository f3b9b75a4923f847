"""`scripts/bench bulk --quick` and `pipeline --quick`, in the session of the tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import bulk
import pipeline
import pytest
from peers.postgresql import is_installed

COPIED = ["copied"] if is_installed() else []
"""Beside PostgreSQL, where there is one."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("main", "benchmark_name", "cases"),
    [
        (bulk.main, "bulk", {"load", "keyed", "posted", *COPIED}),
        (pipeline.main, "pipeline", {"read", "audit", "sink"}),
    ],
)
def test_a_benchmark_of_jobs_in_short(
    main: Callable[[], int],
    benchmark_name: str,
    cases: set[str],
    shared_session: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", "--quick", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == benchmark_name
    figures = report["figures"]
    assert {figure["case"].split()[0].rstrip(":") for figure in figures} == cases
    for figure in figures:
        assert figure["value"] > 0, figure
        assert not figure["wrong"], figure
