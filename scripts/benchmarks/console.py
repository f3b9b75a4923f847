"""The console: what its first view weighs and how long it takes, and what open screens cost.

    scripts/bench console [--quick] [--messages N] [--screens N] [--seconds N] [--json FILE]

first view  a browser that knows nothing yet (Debian's Chromium, driven by Playwright, on the same
            cores) opens the overview of a server with so many pending: bytes of all answers as they
            were sent, until the figures and the forecast are there, and how long that took; the
            median of some rounds
screens     what one overview asks for in so many seconds is written down, and asked for again as
            often as --screens would, each from a moment of its own. No browser runs meanwhile: it
            would be the browsers that are measured. By turns with and without: processor time of
            the server, and how long a publish takes that comes every 5 ms

To reach: 300 KB and a second; 2 % of a core, and no p99.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from billion import KEY_BYTES, MESSAGE_BYTES, ROOM_BYTES, make
from levels.bench import Bench, Size
from levels.opening import open_bench
from load import LoadConnection, LoadError, http_request
from playwright.sync_api import Browser, Request, Response, sync_playwright
from playwright.sync_api import Error as BrowserError
from report import Figure, make_console, make_parser, parse, report
from rich.markup import escape
from servers import BenchmarkError, Served, add_directory, delay_server, demand_space

MESSAGES, MESSAGES_QUICK = 10_000_000, 20_000
ROUNDS, ROUNDS_QUICK = 5, 1
TURNS, TURNS_QUICK = 3, 1
EVERY_S = 0.005
"""A publish, whose latency is that of the server and its disk."""
FIRST_VIEW_MAX_BYTES = 300_000
FIRST_VIEW_MAX_S = 1.0
CORE_SHARE_MAX = 0.02
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
SHOWN = """() => document.querySelector('.tiles') && document.querySelectorAll('canvas').length
    && !document.querySelector('main').innerText.includes('Loading')"""
"""The figures and the charts stand, and nothing else is waited for."""


@dataclass(slots=True)
class Seen:
    """What a browser asked for."""

    shown_s: float = 0.0
    sent_bytes: int = 0
    calls: list[tuple[float, str]] = field(default_factory=list)
    """When, in seconds from the first one on, and which path."""


def look(browser: Browser, port: int, stay_s: float = 0.0) -> Seen:
    """Open the overview in a browser without a cache, and stay there."""
    seen = Seen()
    context = browser.new_context()
    page = context.new_page()
    begun = time.monotonic()

    def asked(request: Request) -> None:
        path = request.url.partition(f":{port}")[2]
        if not path.startswith("/console"):
            seen.calls.append((time.monotonic() - begun, path))

    answers: list[Response] = []

    def answered(response: Response) -> None:
        answers.append(response)

    page.on("request", asked)
    page.on("response", answered)
    page.goto(f"http://127.0.0.1:{port}/console")
    page.wait_for_function(SHOWN)
    seen.shown_s = time.monotonic() - begun
    for answer in list(answers):
        sizes = answer.request.sizes()
        seen.sent_bytes += sizes["responseHeadersSize"] + sizes["responseBodySize"]
    left_s = stay_s - (time.monotonic() - begun)
    if left_s > 0:
        page.wait_for_timeout(1000 * left_s)
    context.close()
    return seen


class Screens(threading.Thread):
    """Asks for what so many screens ask for."""

    def __init__(self, port: int, calls: list[tuple[float, str]], screens: int, for_s: float):
        super().__init__(daemon=True)
        self._port = port
        shifted = sorted(
            ((at_s + for_s * number / screens) % for_s, path)
            for number in range(screens)
            for at_s, path in calls
        )
        head = "GET {} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: gzip\r\n\r\n"
        self._asked = [(at_s, head.format(path).encode()) for at_s, path in shifted]
        self.error: Exception | None = None

    def run(self) -> None:
        begun = time.monotonic()
        try:
            with LoadConnection(self._port) as connection:
                for at_s, request in self._asked:
                    time.sleep(max(0.0, begun + at_s - time.monotonic()))
                    connection.demand(request)
        except (LoadError, OSError) as error:
            self.error = error


@contextmanager
def screens(
    served: Served, calls: list[tuple[float, str]], count: int, for_s: float
) -> Iterator[None]:
    """So many are open inside of the block."""
    if not count:
        yield
        return
    thread = Screens(served.port, calls, count, for_s)
    thread.start()
    yield
    thread.join()
    if thread.error is not None:
        raise BenchmarkError(f"a screen was refused: {thread.error}") from thread.error


def publish_ms(served: Served, for_s: float) -> list[float]:
    """How long each publish took."""
    request = http_request(
        "POST", "/v1/messages", b'{"subject": "bench.console", "body": 1, "delay": "30d"}'
    )
    took_ms = []
    end_s = time.monotonic() + for_s
    with LoadConnection(served.port) as connection:
        while (begun_s := time.monotonic()) < end_s:
            connection.demand(request)
            took_s = time.monotonic() - begun_s
            took_ms.append(1000 * took_s)
            time.sleep(max(0.0, EVERY_S - took_s))
    return took_ms


def measure(bench: Bench, options: Any) -> None:
    """All figures."""
    directory = bench.directory / "data"
    bench.step(f"{options.messages:,} messages are made")
    make(bench, directory, options.messages, 1, is_hot=False, keyed=True)
    rounds = bench.size.of(quick=ROUNDS_QUICK, usual=ROUNDS)
    turns = bench.size.of(quick=TURNS_QUICK, usual=TURNS)
    program = shutil.which("chromium")
    with delay_server(directory) as served:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
            bench.step("first view")
            look(browser, served.port)  # what only the first request to a server costs
            views = [look(browser, served.port) for _ in range(rounds)]
            bench.step("what a screen asks for")
            calls = look(browser, served.port, options.seconds).calls
            browser.close()
        shown_s = statistics.median(one.shown_s for one in views)
        sent_bytes = max(one.sent_bytes for one in views)
        sent = bench.add(Figure("first view: sent", sent_bytes / 1e3, "KB"))
        sent.demand("≤ 300 KB", sent_bytes <= FIRST_VIEW_MAX_BYTES)
        shown = bench.add(Figure("first view: shown", shown_s, "s"))
        shown.demand("≤ 1 s", shown_s <= FIRST_VIEW_MAX_S)
        times_s = sorted(one.shown_s for one in views)
        shown.note = f"{rounds} rounds: {times_s[0]:.2f} to {times_s[-1]:.2f} s"
        used: dict[int, list[float]] = {0: [], options.screens: []}
        took: dict[int, list[float]] = {0: [], options.screens: []}
        for _ in range(turns):
            for count, shares in used.items():
                bench.step(f"{count} screens")
                before_s, begun_s = served.cpu_s(), time.monotonic()
                with screens(served, calls, count, options.seconds):
                    took[count] += publish_ms(served, options.seconds)
                shares.append((served.cpu_s() - before_s) / (time.monotonic() - begun_s))
    share = statistics.median(used[options.screens]) - statistics.median(used[0])
    cost = bench.add(Figure(f"{options.screens} screens: of a core", 100 * share, "%"))
    cost.note = (
        f"{len(calls)} calls of each in {options.seconds} s; beside publishes, less those alone"
    )
    cost.demand("≤ 2 %", share <= CORE_SHARE_MAX)
    for count, some in took.items():
        p50_ms, p99_ms = np.percentile(some, (50, 99)).tolist()
        figure = bench.add(
            Figure(f"publish, {count} screens", len(some) / turns / options.seconds, "/s")
        )
        figure.p50_ms, figure.p99_ms, figure.max_ms = p50_ms, p99_ms, max(some)
        if count:
            bare_ms = float(np.percentile(took[0], 99))
            figure.ratios["p99 without"] = p99_ms / bare_ms


def main() -> int:
    """Exit status 1: it could not be measured."""
    parser = make_parser("console", __doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES, help="how many wait")
    parser.add_argument("--screens", type=int, default=10, help="how many are open")
    parser.add_argument("--seconds", type=int, default=60, help="of each turn")
    add_directory(parser)
    options = parse(parser, messages=MESSAGES_QUICK, seconds=3)
    try:
        demand_space(options.dir, ROOM_BYTES + options.messages * (MESSAGE_BYTES + KEY_BYTES))
    except BenchmarkError as error:
        parser.error(str(error))
    if shutil.which("chromium") is None:
        parser.error("there is no Chromium: install Debian's package chromium")
    console = make_console()
    complete = True
    with open_bench(options.dir, Size.QUICK if options.quick else Size.USUAL, console) as bench:
        try:
            measure(bench, options)
        except (BenchmarkError, BrowserError, LoadError, OSError) as error:
            console.print("[bold red]console failed:[/]", escape(str(error)))
            complete = False
    return report(
        options,
        "console",
        f"the console, {options.messages:,} messages that wait",
        bench.figures,
        console,
        complete=complete,
    )


if __name__ == "__main__":
    sys.exit(main())
