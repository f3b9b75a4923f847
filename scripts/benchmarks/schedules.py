"""What schedules cost: how late their runs come, what they take in memory, and at a start.

    scripts/bench schedules [--quick] [--json FILE] [--schedules 100000] [--firing 1000]

lateness   so many schedules wait, and --firing of them have a run in the same second, evenly spread
           over it, in each of --seconds seconds: from the planned time to the receipt by a consumer
           that pulls
memory     of a server that was started with these schedules, less that of one without, for each
start      from the start of the process, killed before, until all schedules are in their table,
           beside the same without any

To reach, with 100,000 of which 1,000 run in a second: a p99 of 20 ms, 200 bytes each, and a second
more at a start.
"""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from load import LoadConnection, http_request
from report import Figure, make_console, make_parser, parse, report
from servers import BenchmarkError, Served, add_directory, delay_server, disk_directory

from delayserver.config import Settings
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule
from delayserver.records.message import Payload
from delayserver.server.server import Server
from storage.buckets import DAY_MS

FIRING = "firing"
SCHEDULES_MAX = 10_000_000
GROUP = 500
"""Schedules that are made together."""
AHEAD_MS = 1_000
"""So long before the first run everything stands."""
COUNTED_MAX_S = 60.0
BYTES_MAX = 200
START_MAX_S = 1.0
LATENESS_MAX_MS = 20.0


async def fill(directory: Path, count: int) -> None:
    """Make schedules that do not run while anything is measured: with the server's own code, in
    this process, since a request for each would take minutes."""
    settings = Settings(data_dir=directory, schedules_max=SCHEDULES_MAX)
    server = Server(settings, fatal=_fatal)
    await server.start()
    now_ms = int(time.time() * 1000)
    for number in range(count):
        wanted = WantedSchedule(
            f"far-{number:07}",
            "bench.far",
            Payload(b'{"shop": 7}'),
            "",
            DAY_MS * 90,
            "UTC",
            start_ms=now_ms + DAY_MS * 80 + number,
        )
        server.engine.part(Scheduling).put(wanted, now_ms)
        if number % GROUP == 0:
            await server.calls.all_durable()
    await server.calls.checkpoint()
    await server.stop()


def _fatal(error: BaseException) -> None:
    raise error


def lateness_ms(served: Served, firing: int, seconds: int) -> tuple[list[float], float]:
    """How late each run came, from its planned time; and how many schedules a second were made."""
    with LoadConnection(served.port) as connection:
        path = f"/v1/subscriptions/{FIRING}"
        connection.call("PUT", path, {"subject": "bench.firing", "type": "pull", "lease": "1m"})
        took_s = 0.0
        begun = time.monotonic()
        for number in range(firing):
            body = {"shop": number}
            document: dict[str, Any] = {"subject": "bench.firing", "every": "1d", "body": body}
            connection.call("PUT", f"/v1/schedules/run-{number:05}", document)
        took_s = time.monotonic() - begun
        first_ms = int(time.time() * 1000) + AHEAD_MS + int(1500 * took_s)
        for number in range(firing):
            document = {
                "subject": "bench.firing",
                "every": "1s",
                "body": {"shop": number},
                "start_at": first_ms + 1000 * number // firing,
                "max_runs": seconds,
            }
            connection.call("PUT", f"/v1/schedules/run-{number:05}", document)
        if int(time.time() * 1000) > first_ms:
            raise BenchmarkError("making the schedules took longer than it took before")
        return _received(connection, path, firing * seconds), firing / took_s


def _received(connection: LoadConnection, path: str, count: int) -> list[float]:
    pull = http_request("POST", f"{path}/pull", b'{"max": 1000, "wait": "15s"}')
    answers: list[tuple[int, bytes]] = []
    total = 0
    while total < count:
        answer = connection.demand(pull)
        received_ns = time.time_ns()
        got = answer.count(b'"lease":')
        if not got:
            raise BenchmarkError(f"{total} of {count} runs came")
        total += got
        answers.append((received_ns, answer))
    late = []
    for received_ns, answer in answers:
        for message in msgspec.json.decode(answer)["messages"]:
            planned = datetime.fromisoformat(message["headers"]["delay-planned"])
            late.append((received_ns - round(planned.timestamp() * 1000) * 1_000_000) / 1e6)
    return late


def started(directory: Path, schedules: int) -> tuple[float, int]:
    """Seconds from the start of a process until all schedules wait, and its memory then."""
    begun = time.monotonic()
    with delay_server(directory) as served:
        while served.metric("delayserver_schedules") < schedules:
            if time.monotonic() - begun > COUNTED_MAX_S:
                raise BenchmarkError(f"the server does not know of {schedules} schedules")
            time.sleep(0.01)
        ready_s = time.monotonic() - begun
        time.sleep(1)  # what a start leaves behind is given back
        memory = served.memory().anonymous
        served.kill()
    return ready_s, memory


def figures_of(directory: Path, options: Any) -> list[Figure]:
    """All of them, in one data directory and an empty one."""
    count, firing, seconds = options.schedules, options.firing, options.seconds
    with delay_server(directory / "empty") as served:
        served.kill()
    asyncio.run(fill(directory / "data", count))
    with delay_server(directory / "data", f"--schedules-max={SCHEDULES_MAX}") as served:
        found, made_per_s = lateness_ms(served, firing, seconds)
        late = np.array(found)
        runs = served.metric("delayserver_schedule_runs_total")
        skipped = served.metric("delayserver_schedule_runs_skipped_total")
        served.wait_until_filed()
        served.kill()
    p50_ms, p99_ms = np.percentile(late, (50, 99)).tolist()
    lateness = Figure(
        case=f"{firing:,} of {count:,} run in a second",
        value=p99_ms,
        unit="ms",
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        max_ms=float(late.max()),
        note="from the planned time to the receipt",
    )
    lateness.demand(f"p99 ≤ {LATENESS_MAX_MS:.0f} ms", p99_ms <= LATENESS_MAX_MS)
    lateness.expect("runs", int(runs), firing * seconds)
    lateness.expect("skipped", int(skipped), 0)
    lateness.expect("early", int((late < 0).sum()), 0)
    made = Figure(case="made, one after the other", value=made_per_s, unit="/s")
    total = count + firing
    bare_s, bare_bytes = started(directory / "empty", 0)
    with_s, with_bytes = started(directory / "data", total)
    each = (with_bytes - bare_bytes) / total
    memory = Figure(case="memory, each schedule", value=max(each, 0.0), unit="B")
    memory.demand(f"≤ {BYTES_MAX} B", each <= BYTES_MAX)
    start = Figure(
        case=f"start with {total:,} schedules",
        value=with_s,
        unit="s",
        note=f"{bare_s:.2f} s without",
    )
    start.demand(f"≤ {START_MAX_S:.0f} s more", with_s - bare_s <= START_MAX_S)
    return [lateness, made, memory, start]


def main() -> int:
    """Exit status 1: counts were wrong."""
    parser = make_parser("schedules", __doc__)
    parser.add_argument("--schedules", type=int, default=100_000, help="how many wait")
    parser.add_argument("--firing", type=int, default=1000, help="how many run in a second")
    parser.add_argument("--seconds", type=int, default=10, help="in how many seconds")
    add_directory(parser)
    options = parse(parser, schedules=200, firing=20, seconds=2)
    console = make_console()
    with disk_directory(options.dir) as directory, console.status("schedules"):
        figures = figures_of(directory, options)
    return report(options, "schedules", f"{options.schedules:,} schedules", figures, console)


if __name__ == "__main__":
    sys.exit(main())
