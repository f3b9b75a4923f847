"""Every `scripts/bench NAME --quick` ends well, with all of its figures.

bulk and pipeline need Spark: tests/pipeline/test_bench.py; cluster needs brokers:
tests/cluster/test_bench.py."""

import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from levels.bench import Bench, Size, prebuild
from servers import delay_server

from tests.sinks.programs import need

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "scripts" / "benchmarks"
PYTHONPATH = f"{ROOT}:{BENCHMARKS}"

OTHERS = ("pipeline", "cluster")
"""Folders with the tests of other benchmarks."""

# Those limits end what hangs, on a machine however busy: they are no measure.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)

# Of the machine's other users, which are none sometimes; what is lost in the noise of a heap; and
# what is a difference of two measurements, which noise may even turn round.
MAY_BE_NOTHING = re.compile("processors, used by others|memory|screens: of a core")


def figures(
    name: str, directory: Path, *options: str, timeout_s: int = TIMEOUT_S
) -> tuple[list[dict[str, Any]], str]:
    """Figures and output of a benchmark that is run as scripts/bench does it."""
    path = directory / "figures.json"
    done = subprocess.run(
        [sys.executable, "-P", "-m", name, "--quick", "--json", str(path), *options],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    for figure in report["figures"]:
        assert math.isfinite(figure["value"]), figure
        assert figure["value"] > 0 or MAY_BE_NOTHING.search(figure["case"]), figure
        assert not figure.get("wrong"), figure
    return report["figures"], done.stdout


LEVELS = {
    "post": "POST, 2 conn., no key|POST, 2 conn., with key",
    "batch": "batch of 500, JSON|batch of 500, msgpack|batch of 500, keys, JSON|"
    "batch of 500, keys, Arrow",
    "cancel": "cancel by key, 2 conn.|cancel by key, 500 at a time",
    "client": "client, publish, 8 tasks, no keys|client, publish, 8 tasks, generated keys|"
    "client, cancel by key, 8 tasks",
    "lateness": "pull, 1,000 due/s, 1,000 publishes/s",
    "turns": "1,000 due/s, ack, then pull|1,000 due/s, the next pull has the acks",
    "webhook": "webhook, 500 due/s, 500 publishes/s|webhooks, all due at once",
    "neighbours": "webhook, 500 due/s of 100 subscriptions, alone|"
    "webhook, 500 due/s of 100 subscriptions, beside one that hangs",
    "hour": "hour change, 10,000 due|memory, hour of 10,000 loaded",
    "backlog": "memory, 4,000 due tomorrow|disk, 4,000 pending|"
    "memory, 4,000 in a loaded hour, as they came|memory, 4,000 in a loaded hour, restarted",
    "restart": "restart after kill -9, 4,000 later",
    "pull": "pull and ack, 500 at a time, filed|pull and ack, 500 at a time, at once",
    "curves": "publish, 1,000 pending|cancel by key, 1,000 pending|lateness p99, 1,000 pending",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [
        "post,batch,cancel",
        "client,pull,curves",
        "lateness,turns,webhook",
        "neighbours,hour,backlog",
    ],
)
def test_levels(only: str, tmp_path: Path) -> None:
    found, _ = figures("levels", tmp_path, "--only", only)
    by_group: dict[str, list[str]] = {}
    for figure in found:
        if figure["group"] != "calibration":
            by_group.setdefault(figure["group"], []).append(figure["case"])
    wanted = {name: LEVELS[name] for name in only.split(",")}
    if "backlog" in wanted:
        wanted["restart"] = LEVELS["restart"]
    assert {name: "|".join(cases) for name, cases in by_group.items()} == wanted


def test_every_case_of_levels_is_run() -> None:
    from levels.__main__ import CASES

    assert {*CASES, "restart"} == {*LEVELS}


def test_timers(tmp_path: Path) -> None:
    found, _ = figures("timers", tmp_path)
    assert len(found) == 7 * 2 + 4


def test_schedules(tmp_path: Path) -> None:
    found, _ = figures("schedules", tmp_path)
    assert len(found) == 4


def test_console(tmp_path: Path) -> None:
    need("chromium", "ensure_chromium")
    found, _ = figures("console", tmp_path)
    assert len(found) == 5


def test_purgatory(tmp_path: Path) -> None:
    found, _ = figures("purgatory", tmp_path)
    assert len(found) == 7


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    from peers.__main__ import PEERS

    # All that is installed is started, and RabbitMQ alone takes a minute where others work, too.
    found, output = figures("peers", tmp_path)
    measured = {figure["case"].rpartition(": ")[2] for figure in found}
    assert {"delay server", "delay server, client library"} <= measured
    for peer in PEERS:
        assert peer.name in measured or f"{peer.name} is not installed" in output


@pytest.mark.slow
def test_sinks(tmp_path: Path) -> None:
    found, output = figures("sinks", tmp_path, "--only", "redis,nats")
    by_group: dict[str, int] = {}
    for figure in found:
        by_group[figure["group"]] = by_group.get(figure["group"], 0) + 1
    for name in ("redis", "nats"):
        assert by_group.get(name) == 4 or f"{name} is not installed" in output


SHARDS = {
    "post": "POST, keys, 2 conn.: 2 shards|POST, keys, 2 conn.: 1 shard|"
    "POST, keys, 2 conn.: 2 servers",
    "client": "client library, generated keys, 8 tasks: 2 shards|"
    "client library, generated keys, 8 tasks: 1 shard",
    "batch": "batch of 500, keys, JSON: 2 shards|batch of 500, keys, JSON: 1 shard|"
    "batch of 500, keys, JSON: 2 servers|batch of 500, keys, Arrow: 2 shards|"
    "batch of 500, keys, Arrow: 1 shard|batch of 500, keys, Arrow: 2 servers",
    "cancel": "cancel by key, 2 conn.: 2 shards|cancel by key, 2 conn.: 1 shard",
    "hop": "POST to the right shard, keys, 2 conn.|POST to the wrong shard, keys, 2 conn.",
    "lateness": "lateness p99, 500 due/s: 1 shard|lateness p99, 500 due/s: 2 shards",
    "memory": "memory of a shard, idle|memory of the supervisor|"
    "memory of a shard, 4,000 due tomorrow in all",
    "curve": "POST to the owners, keys, 1 shard|POST to the owners, keys, 2 shards|"
    "POST, keys, 2 servers alone|"
    "POST to any, keys, 1 shard|POST to any, keys, 2 shards|"
    "batch of 500 to any, keys, 1 shard|batch of 500 to any, keys, 2 shards",
    "filing": "batch of 500, keys, with filing|batch of 500, keys, without filing",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["post", "client", "batch", "cancel,hop", "lateness,memory", "curve,filing"]
)
def test_shards(only: str, tmp_path: Path) -> None:
    from shards import redis

    found, output = figures("shards", tmp_path, "--only", only)
    by_group: dict[str, list[str]] = {}
    beside: set[str] = set()
    for figure in found:
        if figure["case"].endswith(": Redis"):
            beside.add(figure["group"])
        elif figure["group"] != "calibration":
            by_group.setdefault(figure["group"], []).append(figure["case"])
    wanted = {name: SHARDS[name] for name in only.split(",")}
    assert {name: "|".join(cases) for name, cases in by_group.items()} == wanted
    if redis.is_installed():
        assert beside == {"post", "client", "batch", "cancel"} & {*wanted}
    else:
        assert not beside and redis.MISSING in output


def test_every_case_of_shards_is_run() -> None:
    from shards.__main__ import CASES

    assert {*CASES} == {*SHARDS}


# ── the script ─────────────────────────────────────────────────────────────────────────────────


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "bench", *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_every_benchmark_of_the_script_is_run_here() -> None:
    from measurements import BENCHMARKS as WRITTEN_DOWN

    shown = re.findall(r"^  scripts/bench \[?(\w+)\]? \[options\]", bench("--help").stdout, re.M)
    assert sorted(shown) == sorted((*WRITTEN_DOWN, "client", "turns"))
    files = (Path(__file__), *(ROOT / "tests" / one / "test_bench.py" for one in OTHERS))
    here = "".join(file.read_text() for file in files)
    for name in WRITTEN_DOWN:
        assert re.search(rf'figures\("{name}"|{name}\.main', here), name


def test_turns_of_the_event_loop(tmp_path: Path) -> None:
    found, _ = figures("turns", tmp_path)
    assert found


def test_a_benchmark_that_there_is_not() -> None:
    done = bench("core")
    assert done.returncode == 1
    assert "there is no benchmark 'core'" in done.stderr


# ── a tree's own server ────────────────────────────────────────────────────────────────────────

ANOTHER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b'{"tree": "another"}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_that_of_its_tree(tmp_path: Path) -> None:
    package = tmp_path / "tree" / "delayserver"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(ANOTHER)
    with delay_server(tmp_path / "data", root=tmp_path / "tree") as served:
        assert served.stats() == {"tree": "another"}
        served.kill()


ANOTHER_MAKER = """
BATCH_ROWS = 3


class Maker:
    def __init__(self, root, body, subjects):
        self.root, self.sizes = root, []

    def define(self):
        pass

    def publish(self, due_ms):
        self.sizes.append(len(due_ms))

    def close(self):
        (self.root / "sizes").write_text(str(self.sizes))
"""


def test_a_data_directory_is_made_by_the_code_of_its_tree(tmp_path: Path) -> None:
    below = tmp_path / "tree" / "scripts" / "benchmarks"
    below.mkdir(parents=True)
    (below / "directories.py").write_text(ANOTHER_MAKER)
    with ProcessPoolExecutor() as pool:
        bench = Bench(tmp_path / "tree", tmp_path, pool, Size.QUICK, print)
        prebuild(bench, "made", (7, 0, 1000), (2, 0, 1000))
    assert (tmp_path / "made" / "sizes").read_text() == "[3, 3, 1, 2]"


def test_lanes(tmp_path: Path) -> None:
    found, _ = figures("lanes", tmp_path)
    assert {figure["unit"] for figure in found} == {"µs"}
    assert all(figure["ratios"]["the time of the lane"] > 0 for figure in found)
    assert {figure["case"].partition(":")[0] for figure in found} >= {"publish", "cancel"}


SPREAD = (
    "publish|p99 of single publishes beside|filed|behind a checkpoint|files in schedule/|look up|"
    "cancel|restart after kill -9|load an hour"
)


@pytest.mark.slow
def test_spread(tmp_path: Path) -> None:
    found, _ = figures("spread", tmp_path, "--keys")
    by_case = {figure["case"]: figure for figure in found}
    for name in ("24 h", "2 y"):
        cases = [case.partition(": ")[2] for case in by_case if case.startswith(f"{name}: ")]
        # Of two years no hour need be near enough to have a file.
        is_near = name == "24 h" or "load an hour" in cases
        assert "|".join(cases) == (SPREAD if is_near else SPREAD.removesuffix("|load an hour"))
    assert by_case["24 h: filed"]["ratios"]["24 h"] == 1
    files = by_case["2 y: files in schedule/"]
    assert files["ratios"]["24 h"] == files["value"] / by_case["24 h: files in schedule/"]["value"]
    steady = [figure for figure in found if figure["group"] == "steady"]
    assert len(steady) == 3
    assert all(figure["ratios"]["long frames"] > 0 for figure in steady)


@pytest.mark.slow
def test_billion(tmp_path: Path) -> None:
    found, _ = figures("billion", tmp_path)
    sizes = "4,000 pending", "20,000 pending"
    kinds = [
        {figure["group"] for figure in found if figure["case"].endswith(size)} for size in sizes
    ]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 8
    extrapolated = [figure for figure in found if "1,000,000,000" in figure["case"]]
    assert {figure["unit"] for figure in extrapolated} == {"MB", "GB"}
    assert all("(extrapolated)" in figure["case"] for figure in extrapolated)


def test_billion_says_that_there_is_no_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "billion", "--messages", str(10**12), "--dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "GB are needed in" in done.stderr
