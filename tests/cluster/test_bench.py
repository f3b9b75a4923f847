"""`scripts/bench cluster --quick` ends well, with all of its figures."""

from pathlib import Path

from tests.integration.test_bench import figures

CLUSTER = {
    "publish": ["publish, 8 tasks: cluster", "publish, 8 tasks: own log"],
    "takeover": ["longest wait: the owner is killed (SIGKILL)"],
    "memory": ["memory: supervisor", "memory: owner of a shard", "memory: standby of a shard"],
}


def test_cluster(tmp_path: Path) -> None:
    found, _ = figures("cluster", tmp_path, "--only", ",".join(CLUSTER), timeout_s=250)
    by_group: dict[str, list[str]] = {}
    for figure in found:
        if figure["group"] != "calibration":
            by_group.setdefault(figure["group"], []).append(figure["case"])
    assert by_group == CLUSTER


def test_every_case_of_cluster_is_run() -> None:
    """A drain is tried by test_here.py; no call that failed would be no figure here."""
    from cluster.__main__ import CASES

    assert {*CASES} == {*CLUSTER, "drain"}
