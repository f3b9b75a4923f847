"""The crash harness: a real server under load, killed at random moments, judged by a ledger.

    load          publishes with and without keys, batches, cancels and moves by id and by key
    receivers     a webhook that is slow at times and fails at times; consumers that acknowledge,
                  refuse, or let the lease end
    each round    start, perhaps killed while it recovers; load; SIGKILL at a random moment, or as
                  soon as a checkpoint shows in the files
    some rounds   the clock is set forward so that the hour changes within the round
    the end       all that is open has to be delivered, and after a graceful stop and one more start
                  nothing may come again

One data directory goes through all rounds. What counts as a broken promise is defined in
`delayserver.cli.demo.ledger`. The seed decides what happens to the server and which load it gets,
the machine how fast: a seed narrows a failure down, and the directory that is kept shows it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from delayserver.cli.demo.ledger import (
    RECEIVE_MS,
    VIOLATIONS,
    DemoLedger,
    Order,
    Outage,
    Verdict,
    judge,
)
from delayserver.cli.demo.process import ServerFailed, ServerProcess, damage_in, free_port
from delayserver.cli.demo.receiver import Receiver
from delayserver.cli.demo.shop import call, due_of, parse_json
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpTransport

HOUR_MS = 3_600_000

PUBLISHERS = 8
CONSUMERS = 2
PAUSE_S = 0.02
"""Between two publishes of one publisher, at most."""
RETRY_S = 0.05
GRACE_S = 30.0
QUIET_S = 1.5
LEASE_MS = 1500
FILLINGS = {size: "x" * size for size in (0, 10, 100, 1000, 20_000)}
"""Made once: a long run has hundreds of thousands of messages."""
LOAD_S = (0.1, 1.2)
"""How long the load of a round lasts, at least and at most."""
CHECKPOINT_SHARE = 0.25
"""Of the rounds: the kill waits for a checkpoint."""
CHECKPOINT_WAIT_S = 1.5
LOOK_S = 0.0005
CHECK_SHARE = 0.3
"""Of the rounds: the files are checked while the server is down."""

HOOK, PULL, BOTH = "crash.hook", "crash.pull", "crash.both.x"
SUBSCRIBERS = {
    HOOK: ("hook",),
    PULL: ("pull",),
    BOTH: ("both-hook", "both-pull"),
}
CONSUMED = ("pull", "both-pull")


@dataclass
class Outcome:
    """A run, judged."""

    seed: int
    directory: Path
    ledger: DemoLedger
    verdict: Verdict
    failures: list[str]
    """What went wrong beyond the ledger: answers that must not be, a server that did not start."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.is_clean and not self.failures and not self.ledger.strangers


class CrashRun:
    """One run on one data directory."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        rounds: int,
        minutes: float | None = None,
        report: Callable[["CrashRun"], None] = lambda run: None,
    ) -> None:
        self.rounds = rounds
        self.rounds_done = 0
        self.ledger = DemoLedger()
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._seed = seed
        # What happens to the server does not depend on how far the load happens to get.
        self._fate = random.Random(seed)
        self._random = random.Random(seed + 1)
        self._directory = directory
        self._deadline_s = None if minutes is None else time.monotonic() + 60 * minutes
        self._report = report
        self._start_s = 0.7
        self._follow_ups: set[asyncio.Task[None]] = set()
        self._down_ms: int | None = None

    async def run(self) -> Outcome:
        """All rounds, then the end."""
        port = free_port()
        self._client = HttpTransport(f"http://127.0.0.1:{port}")
        async with Receiver(self._on_webhook) as receiver:
            with ServerProcess(
                self._directory / "data", port=port, log_path=self._directory / "server.log"
            ) as server:
                self._server = server
                try:
                    await self._live(receiver.url)
                except* ServerFailed as group:
                    self.failures += [str(error) for error in group.exceptions]
        await self._client.close()
        return Outcome(
            self._seed,
            self._directory,
            self.ledger,
            judge(self.ledger),
            self.failures,
            self.counts,
        )

    async def _live(self, url: str) -> None:
        await self._start()
        await self._subscribe(url)
        async with asyncio.TaskGroup() as tasks:
            consumers = [
                tasks.create_task(self._consume(name))
                for name in CONSUMED
                for _ in range(CONSUMERS)
            ]
            publishers = [tasks.create_task(self._publish()) for _ in range(PUBLISHERS)]
            while self._goes_on():
                await self._round()
                self.rounds_done += 1
                self._report(self)
            await self._end(publishers)
            for consumer in consumers:
                consumer.cancel()

    def _goes_on(self) -> bool:
        if self._deadline_s is not None:
            return time.monotonic() < self._deadline_s
        return self.rounds_done < self.rounds

    # ── the server's life ──────────────────────────────────────────────────────────────────────

    async def _round(self) -> None:
        """Load until the kill, and the next start, which may be killed as well."""
        await asyncio.sleep(self._fate.uniform(*LOAD_S))
        if self._fate.random() < CHECKPOINT_SHARE and await self._in_a_checkpoint():
            self.counts["kills in a checkpoint"] += 1
        self._kill()
        if self._fate.random() < CHECK_SHARE:
            await self._check()
        if self._fate.random() < 0.3:
            await self._come_near_the_hour()
        while self._fate.random() < 0.35:
            self._launch()
            # Half of them before Python has read the program, half anywhere in the recovery.
            longest_s = self._fate.choice((0.3, self._start_s * 1.1))
            await asyncio.sleep(self._fate.uniform(0, longest_s))
            self._kill()
            self.counts["kills during start"] += 1
        await self._start()

    async def _in_a_checkpoint(self) -> bool:
        """Wait until the server files or commits; False if it does not.

        A checkpoint writes schedule files, syncs them, commits the catalog, deletes segments. The
        kill comes within a millisecond or two of what is seen of it."""
        sign = self._fate.choice(("schedule", "catalog"))
        wait_s = self._fate.uniform(0, 0.003)
        directory = self._server.data_dir / sign
        if not await asyncio.to_thread(_changes, directory, CHECKPOINT_WAIT_S):
            return False
        await asyncio.sleep(wait_s)
        return True

    def _kill(self) -> None:
        if not self._server.is_running:
            raise ServerFailed("the server ended by itself; see server.log")
        if self._down_ms is None:
            self._down_ms = self.ledger.now_ms()
        self._server.kill()
        self.ledger.kills_ms.append(self.ledger.now_ms())
        self.counts["kills"] += 1

    async def _come_near_the_hour(self) -> None:
        """Set the clock of the next start forward, to shortly before an hour begins."""
        await asyncio.sleep(RECEIVE_MS / 1000)  # what was sent is received by the old clock
        to_hour_ms = HOUR_MS - self.ledger.now_ms() % HOUR_MS
        before_ms = round(1000 * (self._start_s + self._fate.uniform(-0.3, 1.5)))
        self.ledger.offset_ms += (to_hour_ms - before_ms) % HOUR_MS
        self.counts["hour changes"] += 1

    def _launch(self) -> None:
        choose = self._fate.choice
        self._server.options = [
            f"--clock-offset-ms={self.ledger.offset_ms}",
            f"--segment-bytes={choose((1 << 18, 1 << 20, 1 << 26))}",
            f"--checkpoint-ms={choose((50, 200, 1000))}",
            f"--settle-sync-ms={choose((0, 20, 100))}",
            # A publish that is asked again after the clock was set forward is still the same.
            "--dedupe-window-ms=2d",
            f"--retention-ms={choose((0, 1000, HOUR_MS))}",
            "--disk-reserve-bytes=1048576",
        ]
        self._server.start()

    async def _start(self) -> None:
        began_s = time.monotonic()
        self._launch()
        await asyncio.to_thread(self._server.wait_ready)
        self._start_s = time.monotonic() - began_s
        if self._down_ms is not None:
            self.ledger.outages.append(Outage(self._down_ms, self.ledger.now_ms()))
            self._down_ms = None

    async def _end(self, publishers: list[asyncio.Task[None]]) -> None:
        """Everything falls due and is delivered; then nothing comes any more."""
        for publisher in publishers:
            publisher.cancel()
        await asyncio.gather(*publishers, return_exceptions=True)
        if self._follow_ups:
            await asyncio.wait(self._follow_ups, timeout=GRACE_S)
        self._kill()
        await asyncio.sleep(RECEIVE_MS / 1000)
        last_ms = max((order.due_ms for order in self.ledger.orders), default=0)
        self.ledger.offset_ms += max(0, last_ms - self.ledger.now_ms())
        await self._start()
        deadline_s = time.monotonic() + GRACE_S
        while self.ledger.open_count and time.monotonic() < deadline_s:
            await asyncio.sleep(RETRY_S)
            self._report(self)
        await asyncio.sleep(QUIET_S)
        await self._stop()
        await self._start()
        await asyncio.sleep(QUIET_S)
        await self._stop()
        await self._check()

    async def _check(self) -> None:
        self.counts["checks of the files"] += 1
        self.failures += await asyncio.to_thread(damage_in, self._server.data_dir)

    async def _stop(self) -> None:
        status = await asyncio.to_thread(self._server.stop)
        if status != 0:
            self.failures.append(f"the server ended with status {status} after SIGTERM")

    async def _subscribe(self, url: str) -> None:
        retry = {"max_attempts": 100, "backoff": ["100ms"] * 20}
        for name, subject in (("hook", HOOK), ("both-hook", "crash.both.*")):
            document = {"subject": subject, "type": "webhook", "url": url + name, "retry": retry}
            await self._ask("PUT", path("subscriptions", name), document)
        for name, subject in (("pull", PULL), ("both-pull", BOTH)):
            document = {"subject": subject, "type": "pull", "lease": f"{LEASE_MS}ms"}
            await self._ask("PUT", path("subscriptions", name), document)

    # ── asking ─────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, method: str, where: str, document: object = None) -> tuple[int, Any]:
        """Ask until there is an answer."""
        while True:
            try:
                return await self._ask_once(method, where, document)
            except UnansweredError:
                await asyncio.sleep(RETRY_S)

    async def _ask_once(self, method: str, where: str, document: object = None) -> tuple[int, Any]:
        """One request. Raises UnansweredError, also for "try again later"."""
        status, answer = await call(self._client, method, where, document)
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            raise UnansweredError(f"{status}")
        # Only what is done to a message may come too late for it.
        may_refuse = method in ("DELETE", "PATCH")
        refusals = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT) if may_refuse else ()
        if status >= HTTPStatus.BAD_REQUEST and status not in refusals:
            self._fail(f"{method} {where}: {status} {answer}")
            raise UnansweredError(f"{status}")
        return status, answer

    def _fail(self, what: str) -> None:
        if what not in self.failures:
            self.failures.append(what)

    # ── publishing, cancelling, moving ─────────────────────────────────────────────────────────

    async def _publish(self) -> None:
        chance = self._random
        while True:
            await asyncio.sleep(chance.uniform(0, PAUSE_S))
            if chance.random() < 0.05:
                await self._publish_batch()
                continue
            order, delay_ms = self._new_order()
            order.publish_asked(delay_ms, self.ledger.now_ms())
            try:
                # Without a key, to ask again would be to publish twice.
                ask = self._ask_once if order.key is None else self._ask
                _, answer = await ask("POST", path("messages"), _document(order, delay=delay_ms))
            except UnansweredError:
                self.counts["publishes without an answer"] += 1
                continue
            order.publish_answered(answer["id"], due_of(answer), self.ledger.now_ms())
            self._follow(order, delay_ms)

    async def _publish_batch(self) -> None:
        batch = [self._new_order(with_key=True) for _ in range(self._random.randint(2, 40))]
        for order, delay_ms in batch:
            order.publish_asked(delay_ms, self.ledger.now_ms())
        # The answer names no due times: a delay would count from whenever the server heard of it,
        # and a batch that is asked again may be heard after the clock was set forward.
        documents = [_document(order, deliver_at=order.earliest_ms) for order, _ in batch]
        _, answer = await self._ask("POST", path("messages", "batch"), documents)
        for (order, delay_ms), message_id in zip(batch, answer["ids"], strict=True):
            order.publish_answered(message_id, order.earliest_ms, self.ledger.now_ms())
            self._follow(order, delay_ms)

    def _new_order(self, *, with_key: bool | None = None) -> tuple[Order, int]:
        chance = self._random
        subject = chance.choice((HOOK, PULL, BOTH))
        size = chance.choice((0, 100, 100, 1000, 20_000 if chance.random() < 0.1 else 10))
        order = self.ledger.order(
            subject,
            SUBSCRIBERS[subject],
            with_key=chance.random() < 0.6 if with_key is None else with_key,
            filling=FILLINGS[size],
        )
        return order, self._delay_ms()

    def _delay_ms(self) -> int:
        chance = self._random
        kind = chance.random()
        if kind < 0.1:
            return 0
        if kind < 0.3:
            return chance.randint(1, 300)
        if kind < 0.75:
            return chance.randint(300, 4000)
        to_hour_ms = HOUR_MS - self.ledger.now_ms() % HOUR_MS
        if kind < 0.85:  # around the next hour, often on the millisecond
            return max(0, to_hour_ms + chance.choice((-1, 0, 0, 1, chance.randint(-2000, 2000))))
        if kind < 0.97:
            return HOUR_MS + chance.randint(-3000, 3000)
        return to_hour_ms + chance.randint(1, 3) * HOUR_MS + chance.randint(-5, 5)

    def _follow(self, order: Order, delay_ms: int) -> None:
        """What happens to an order after it was published."""
        chance = self._random
        wait_s = min(delay_ms, chance.randint(0, 3000)) / 1000 * chance.uniform(0, 1.1)
        kind = chance.random()
        if kind < 0.35:
            self._later(wait_s, self._cancel(order))
        elif kind < 0.5:
            self._later(wait_s, self._move(order))

    def _later(self, wait_s: float, work: Coroutine[None, None, None]) -> None:
        async def run() -> None:
            await asyncio.sleep(wait_s)
            await work

        task = asyncio.create_task(run())
        self._follow_ups.add(task)
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[None]) -> None:
        self._follow_ups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(repr(error))

    def _where(self, order: Order) -> str:
        if order.key is not None and self._random.random() < 0.5:
            return path("subjects", order.subject, "keys", order.key)
        return path("messages", min(order.message_ids))

    async def _cancel(self, order: Order) -> None:
        order.cancel_asked = True
        # Some give up without an answer: such a message may be delivered, or not.
        ask = self._ask if self._random.random() < 0.7 else self._ask_once
        try:
            status, _ = await ask("DELETE", self._where(order))
        except UnansweredError:
            self.counts["cancels without an answer"] += 1
            return
        order.cancel_asked = False
        if status == HTTPStatus.OK:
            order.cancelled_ms = self.ledger.now_ms()
        else:
            self.counts["cancels refused"] += 1

    async def _move(self, order: Order) -> None:
        delay_ms = self._delay_ms()
        order.move_asked(self.ledger.now_ms() + delay_ms)
        ask = self._ask if self._random.random() < 0.7 else self._ask_once
        try:
            status, answer = await ask("PATCH", self._where(order), {"delay": delay_ms})
        except UnansweredError:
            self.counts["moves without an answer"] += 1
            return
        if status != HTTPStatus.OK:
            self.counts["moves refused"] += 1
            return
        order.move_answered(due_of(answer), self.ledger.now_ms())
        self.counts["moved"] += 1
        if self._random.random() < 0.3:
            await self._cancel(order)

    # ── receiving ──────────────────────────────────────────────────────────────────────────────

    async def _on_webhook(self, headers: Mapping[str, str], body: bytes) -> int:
        name = "hook" if headers.get("delay-subject") == HOOK else "both-hook"
        message_id = headers.get("webhook-id", "")
        receipt = self.ledger.receive(name, message_id, parse_json(body), settled=False)
        if self._random.random() < 0.1:
            await asyncio.sleep(self._random.uniform(0, 0.1))
        if self._random.random() < 0.05:
            self.counts["webhooks refused"] += 1
            return HTTPStatus.INTERNAL_SERVER_ERROR
        receipt.settled_ms = self.ledger.now_ms()
        return HTTPStatus.OK

    async def _consume(self, name: str) -> None:
        chance = self._random
        where = path("subscriptions", name)
        while True:
            request = {"max": chance.randint(1, 50), "wait": chance.choice((0, 200, 1000))}
            _, answer = await self._ask("POST", f"{where}/pull", request)
            taken = {
                message["lease"]: self.ledger.receive(
                    name, message["id"], message.get("body"), settled=False
                )
                for message in answer["messages"]
            }
            done = {lease: receipt for lease, receipt in taken.items() if chance.random() < 0.85}
            refused = [lease for lease in taken.keys() - done.keys() if chance.random() < 0.5]
            try:
                if refused:
                    await self._ask_once("POST", f"{where}/nack", {"leases": refused})
                if not done:
                    continue
                for receipt in done.values():
                    receipt.ack_asked = True
                _, answer = await self._ask_once("POST", f"{where}/ack", {"leases": list(done)})
            except UnansweredError:
                continue
            expired = set(answer["expired"])
            for lease, receipt in done.items():
                receipt.ack_asked = False
                if lease not in expired:
                    receipt.acknowledged(self.ledger.now_ms())
                    self.counts["acknowledged"] += 1


def _changes(directory: Path, wait_s: float) -> bool:
    """Whether a file of a directory is written to within that time; returns as soon as one is."""
    before = _written_at(directory)
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        if _written_at(directory) != before:
            return True
        time.sleep(LOOK_S)
    return False


def _written_at(directory: Path) -> set[tuple[str, int, int]]:
    found = set()
    for entry in os.scandir(directory):
        # A file may be deleted meanwhile; LMDB's readers write into its lock file all the time.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            if entry.name != "lock.mdb":
                found.add((entry.name, status.st_mtime_ns, status.st_size))
    return found


def _document(order: Order, **when: int) -> dict[str, object]:
    document: dict[str, object] = {"subject": order.subject, "body": order.body, **when}
    if order.key is not None:
        document["key"] = order.key
    return document


# ---- the script --------------------------------------------------------------------------------


def main() -> None:
    """`scripts/crash`."""
    parser = argparse.ArgumentParser(
        prog="scripts/crash",
        description="Kill a server under load again and again, and count what it lost: nothing.",
    )
    parser.add_argument("--rounds", type=int, default=20, help="kills under load (default: 20)")
    parser.add_argument("--minutes", type=float, help="go on for this long instead")
    parser.add_argument("--seed", type=int, help="do the same again (default: a new one)")
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    directory = Path(tempfile.mkdtemp(prefix="delayserver-crash-"))
    outcome = _run_with_progress(directory, seed, arguments.rounds, arguments.minutes)
    _show(outcome)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report_of(outcome)) + "\n")
    if outcome.is_clean and not arguments.keep:
        shutil.rmtree(directory)
    else:
        outcome.ledger.write(directory / "ledger.jsonl")
        print(f"data, log and ledger: {directory}")
    raise SystemExit(0 if outcome.is_clean else 1)


def _run_with_progress(directory: Path, seed: int, rounds: int, minutes: float | None) -> Outcome:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(() if minutes else (MofNCompleteColumn(), TimeRemainingColumn())),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = None if minutes is not None else rounds
        bar = progress.add_task(f"seed {seed}", total=total)

        def report(run: CrashRun) -> None:
            text = f"{run.counts['kills']:,} kills, {len(run.ledger.orders):,} messages"
            if run.failures:
                text += f", {len(run.failures)} failures"
            progress.update(bar, completed=run.rounds_done, description=text)

        run = CrashRun(directory, seed=seed, rounds=rounds, minutes=minutes, report=report)
        return asyncio.run(run.run())


def report_of(outcome: Outcome) -> dict[str, Any]:
    """What happened and what went wrong, in the form of the benchmarks."""
    verdict = outcome.verdict
    counts = {
        **{name: getattr(verdict, name) for name in ("published", "cancelled", "delivered")},
        **dict(sorted(outcome.counts.items())),
        **{name.replace("_", " "): len(getattr(verdict, name)) for name in VIOLATIONS},
        "failures": len(outcome.failures),
    }
    figures = [{"case": case, "value": count, "unit": ""} for case, count in counts.items()]
    return {"benchmark": "crash", "figures": figures}


def _show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    verdict = outcome.verdict
    table = Table(title=f"crash run, seed {outcome.seed}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("published", "cancelled", "delivered", "repeated"):
        table.add_row(name, f"{getattr(verdict, name):,}")
    for name, count in sorted(outcome.counts.items()):
        table.add_row(name, f"{count:,}")
    late_ms = verdict.lateness_percentile_ms(99)
    table.add_row("late, p99", "–" if late_ms is None else f"{late_ms} ms")
    table.add_section()
    for name in VIOLATIONS:
        count = len(getattr(verdict, name))
        table.add_row(name.replace("_", " "), f"{count:,}", style="bold red" if count else "green")
    table.add_row("never published", str(len(outcome.ledger.strangers)))
    table.add_row("failures", str(len(outcome.failures)))
    console = Console()
    console.print(table)
    for line in describe(outcome):
        console.print(line, markup=False, highlight=False)


def describe(outcome: Outcome) -> list[str]:
    """A line for everything that went wrong."""
    lines = [
        f"{name}: {json.dumps(order.to_json())}" for name, order in outcome.verdict.violations()
    ]
    lines += [f"never published: {stranger}" for stranger in outcome.ledger.strangers]
    return lines + outcome.failures


if __name__ == "__main__":
    main()
