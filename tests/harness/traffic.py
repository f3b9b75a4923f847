"""The traffic of all runs: clients that write down in the ledger all that they ask and get.

    publishers    one message or a batch, with keys and without; later some cancel or move it
    receivers     a webhook that is slow at times and fails at times
    consumers     acknowledge, refuse, or let the lease end

An answer that no good client should get is a failure. "Try again later" means that nothing was
done, unless it says that the outcome is unknown. A run that has other clients overrides `writers`,
which end before the end of the run, or `readers`, which go on until all is delivered.

Cost: some 300 µs per message. Threads: belongs to the event loop.
"""

import asyncio
import json
import random
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgpack

from delayserver.cli.demo.ledger import Order, Receipt
from delayserver.cli.demo.shop import call, due_of, parse_json
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import (
    NO_HEADERS,
    TIMEOUT_S,
    HttpAnswer,
    HttpTransport,
)
from tests.harness.notes import Notes

HOUR_MS = 3_600_000
MSGPACK = "application/msgpack"
RETRY_S = 0.05
FILLINGS = {size: "x" * size for size in (0, 10, 100, 1000, 20_000)}
"""Made once: a long run has hundreds of thousands of messages."""

HOOK, PULL, BOTH = "load.hook", "load.pull", "load.both.x"
SUBSCRIBERS = {
    HOOK: ("hook",),
    PULL: ("pull",),
    BOTH: ("both-hook", "both-pull"),
}
CONSUMED = ("pull", "both-pull")
LEASE_MS = 1500


class LaterError(UnansweredError):
    """The server answered that nobody knows what became of it; it may be asked again."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(f"{status}")
        self.answer = answer


class RefusedError(LaterError):
    """The server answered that it did not do it; it may be asked again."""


class Doors:
    """A `Transport` to all processes of a server: connections of some clients, by turns.

    `urls`: an address for each client. Where several processes accept at one address, the system
    decides which one does, so a share of the calls (`leave_share`) closes its connection: else a
    process that comes back would get none. `ask_s`: nobody waits longer for an answer. A client
    that was closed begins anew with its next call."""

    def __init__(
        self,
        urls: Sequence[str],
        chance: random.Random,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        leave_share: float = 0.0,
        ask_s: float = TIMEOUT_S,
    ) -> None:
        self._chance = chance
        self._leave_share = leave_share
        self._ask_s = ask_s
        self._open = lambda: [HttpTransport(url, token=token, tls=tls) for url in urls]
        self._transports = self._open()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        """As `Transport` says."""
        if self._leave_share and self._chance.random() < self._leave_share:
            headers = {**headers, "connection": "close"}
        return await self._chance.choice(self._transports).request(
            *(method, path, body),
            headers=headers,
            timeout_s=min(timeout_s, self._ask_s),
            content_type=content_type,
        )

    async def close(self) -> None:
        """As `Transport` says."""
        closing, self._transports = self._transports, self._open()
        for transport in closing:
            await transport.close()


async def pause(chance: random.Random, least_s: float, most_s: float) -> None:
    """A pause of random length, as clients make them."""
    await asyncio.sleep(chance.uniform(least_s, most_s))


async def before_retry() -> None:
    """The pause of a client that asks again."""
    await asyncio.sleep(RETRY_S)


class Traffic:
    """Clients of a server. A seed decides about them."""

    PUBLISHERS = 8
    CONSUMERS = 2
    """How many each subscription has."""
    PAUSE_S = 0.02
    """Between two publishes of one publisher, at most."""
    MIXED_SHARE = 0.0
    """Of the batches: some messages have no key, so nobody asks again."""
    subscribers: Mapping[str, tuple[str, ...]] = SUBSCRIBERS
    subjects: Sequence[str] = tuple(SUBSCRIBERS)
    """One that stands here more often gets more messages."""

    def __init__(self, notes: Notes, client: Doors, seed: int) -> None:
        self.notes = notes
        self.ledger = notes.ledger
        self.counts = notes.counts
        self.client = client
        self._random = random.Random(seed)
        self._follow_ups: set[asyncio.Task[None]] = set()

    def writers(self) -> list[Coroutine[Any, Any, None]]:
        """The clients that publish, until the end begins."""
        return [self._publish() for _ in range(self.PUBLISHERS)]

    def readers(self) -> list[Coroutine[Any, Any, None]]:
        """The clients that receive, until the end is over."""
        return [self._consume(name) for name in CONSUMED for _ in range(self.CONSUMERS)]

    async def followed(self, timeout_s: float) -> None:
        """Wait for the cancels and moves that are under way."""
        if self._follow_ups:
            await asyncio.wait(self._follow_ups, timeout=timeout_s)

    async def read(self) -> None:
        """Look for deliveries that do not come by themselves. Called again and again at the end."""

    async def look(self) -> None:
        """Look at the server once all that is due was delivered. Notes a failure for each promise
        that is broken."""

    async def ended(self) -> None:
        """Look at all that was delivered, when no server runs any more."""

    async def subscribe(self, url: str) -> None:
        """Make the subscriptions, to webhooks below `url`."""
        retry = {"max_attempts": 100, "backoff": ["100ms"] * 20}
        for name, subject in (("hook", HOOK), ("both-hook", "load.both.*")):
            document = {"subject": subject, "type": "webhook", "url": url + name, "retry": retry}
            await self.ask("PUT", path("subscriptions", name), document)
        for name, subject in (("pull", PULL), ("both-pull", BOTH)):
            document = {"subject": subject, "type": "pull", "lease": f"{LEASE_MS}ms"}
            await self.ask("PUT", path("subscriptions", name), document)

    # ── asking ─────────────────────────────────────────────────────────────────────────────────

    async def ask(self, method: str, where: str, document: object = None) -> tuple[int, Any]:
        """Ask until there is an answer."""
        while True:
            try:
                return await self.ask_once(method, where, document)
            except UnansweredError:
                await before_retry()

    async def ask_once(
        self, method: str, where: str, document: object = None, *, is_packed: bool = False
    ) -> tuple[int, Any]:
        """One request; `is_packed`: as MessagePack. Raises UnansweredError, also for "try again
        later"."""
        if is_packed:
            body = msgpack.packb(document)
            told = await self.client.request(method, where, body, content_type=MSGPACK)
            status, answer = told.status, json.loads(told.body)
        else:
            status, answer = await call(self.client, method, where, document)
        if self._is_refusal(status, answer):
            is_unknown = isinstance(answer, dict) and answer.get("outcome") == "unknown"
            raise (LaterError if is_unknown else RefusedError)(status, answer)
        # Only what is done to a message may come too late for it.
        may_refuse = method in ("DELETE", "PATCH")
        refusals = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT) if may_refuse else ()
        if status >= HTTPStatus.BAD_REQUEST and status not in refusals:
            self.notes.fail(f"{method} {where}: {status} {answer}")
            raise UnansweredError(f"{status}")
        return status, answer

    def _is_refusal(self, status: int, answer: Any) -> bool:
        """Whether a good client may get this answer, and may ask again."""
        return status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)

    # ── publishing, cancelling, moving ─────────────────────────────────────────────────────────

    async def _publish(self) -> None:
        while True:
            await pause(self._random, 0, self.PAUSE_S)
            if self._random.random() < 0.05:
                await self._publish_batch()
            else:
                await self._publish_one()

    async def _publish_one(self) -> None:
        order, delay_ms = self._new_order()
        self.ledger.publish_asked(order, delay_ms)
        try:
            # Without a key, to ask again would be to publish twice.
            ask = self.ask_once if order.key is None else self.ask
            _, answer = await ask("POST", path("messages"), document_of(order, delay=delay_ms))
        except UnansweredError as error:
            order.refused = isinstance(error, RefusedError)
            self.counts["publishes without an answer"] += 1
            return
        self.ledger.publish_answered(order, answer["id"], due_of(answer))
        self._follow(order, delay_ms)

    async def _publish_batch(self, *, is_packed: bool = False) -> None:
        is_mixed = self._random.random() < self.MIXED_SHARE
        batch = [
            self._new_order(with_key=not is_mixed or self._random.random() < 0.5)
            for _ in range(self._random.randint(2, 40))
        ]
        for order, delay_ms in batch:
            self.ledger.publish_asked(order, delay_ms)
        # The answer names no due times: a delay would count from whenever the server heard of it,
        # and a batch that is asked again may be heard after the clock was set forward.
        documents = [document_of(order, deliver_at=order.earliest_ms) for order, _ in batch]
        while True:
            try:
                _, answer = await self.ask_once(
                    "POST", path("messages", "batch"), documents, is_packed=is_packed
                )
            except UnansweredError as error:
                if isinstance(error, LaterError):
                    self._note_parts(batch, error, is_final=is_mixed)
                if is_mixed:
                    self.counts["batches without an answer"] += 1
                    return
                await before_retry()
            else:
                break
        for (order, delay_ms), message_id in zip(batch, answer["ids"], strict=True):
            self.ledger.publish_answered(order, message_id, order.earliest_ms)
            self._follow(order, delay_ms)

    def _note_parts(
        self, batch: Sequence[tuple[Order, int]], error: LaterError, *, is_final: bool
    ) -> None:
        """What one shard has of a batch is durable, whatever another said. `is_final`: nobody asks
        again for what was refused."""
        ids = error.answer.get("ids") or [None] * len(batch)
        for (order, _), message_id in zip(batch, ids, strict=True):
            if message_id is not None:
                self.ledger.publish_answered(order, message_id, order.earliest_ms)
                self.counts["answered in a part of a batch"] += 1
            elif is_final:
                order.refused = isinstance(error, RefusedError)

    def _new_order(self, *, with_key: bool | None = None) -> tuple[Order, int]:
        chance = self._random
        subject = chance.choice(self.subjects)
        size = chance.choice((0, 100, 100, 1000, 20_000 if chance.random() < 0.1 else 10))
        order = self.ledger.order(
            subject,
            self.subscribers[subject],
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
        to_hour_ms = HOUR_MS - self.ledger.server_ms() % HOUR_MS
        if kind < 0.85:  # around the next hour, often on the millisecond
            return max(0, to_hour_ms + chance.choice((-1, 0, 0, 1, chance.randint(-2000, 2000))))
        if kind < 0.97:
            return HOUR_MS + chance.randint(-3000, 3000)
        return to_hour_ms + chance.randint(1, 3) * HOUR_MS + chance.randint(-5, 5)

    def _when(self, delay_ms: int) -> dict[str, int]:
        """How a move says when."""
        return {"delay": delay_ms}

    def _follow(self, order: Order, delay_ms: int) -> None:
        """What happens to an order after it was published."""
        chance = self._random
        wait_s = min(delay_ms, chance.randint(0, 3000)) / 1000 * chance.uniform(0, 1.1)
        kind = chance.random()
        if kind < 0.35:
            self._later(wait_s, self._cancel, order)
        elif kind < 0.5:
            self._later(wait_s, self._move, order)

    def _later(self, wait_s: float, work: Callable[[Order], Awaitable[None]], order: Order) -> None:
        async def run() -> None:
            await asyncio.sleep(wait_s)
            await work(order)

        task = asyncio.create_task(run())
        self._follow_ups.add(task)
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[None]) -> None:
        self._follow_ups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.notes.fail(repr(error))

    def _where(self, order: Order) -> str:
        if order.key is not None and self._random.random() < 0.5:
            return path("subjects", order.subject, "keys", order.key)
        return path("messages", min(order.message_ids))

    async def _cancel(self, order: Order) -> None:
        order.cancel_asked = True
        # Some give up without an answer: such a message may be delivered, or not.
        ask = self.ask if self._random.random() < 0.7 else self.ask_once
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
        when, earliest_ms = self._when(delay_ms), order.earliest_ms
        order.move_asked(self.ledger.server_ms() + delay_ms, self.ledger.now_ms())
        ask = self.ask if self._random.random() < 0.7 else self.ask_once
        try:
            status, answer = await ask("PATCH", self._where(order), when)
        except UnansweredError as error:
            if isinstance(error, RefusedError):
                order.move_refused(earliest_ms, self.ledger.now_ms())
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

    async def on_webhook(self, headers: Mapping[str, str], body: bytes) -> int:
        """Receive a webhook; the status that is answered."""
        receipt = self._on_delivered(headers, body)
        if self._random.random() < 0.1:
            await pause(self._random, 0, 0.1)
        if self._random.random() < 0.05:
            self.counts["webhooks refused"] += 1
            return HTTPStatus.INTERNAL_SERVER_ERROR
        receipt.settled_ms = self.ledger.now_ms()
        return HTTPStatus.OK

    def _on_delivered(self, headers: Mapping[str, str], body: bytes) -> Receipt:
        name = "hook" if headers.get("delay-subject") == HOOK else "both-hook"
        message_id = headers.get("webhook-id", "")
        return self.ledger.receive(name, message_id, parse_json(body), settled=False)

    def _on_pulled(self, name: str, message: Mapping[str, Any]) -> Receipt:
        return self.ledger.receive(name, message["id"], message.get("body"), settled=False)

    async def _consume(self, name: str) -> None:
        chance = self._random
        where = path("subscriptions", name)
        while True:
            request = {"max": chance.randint(1, 50), "wait": chance.choice((0, 200, 1000))}
            _, answer = await self.ask("POST", f"{where}/pull", request)
            taken = {
                message["lease"]: self._on_pulled(name, message) for message in answer["messages"]
            }
            done = {lease: receipt for lease, receipt in taken.items() if chance.random() < 0.85}
            refused = [lease for lease in taken.keys() - done.keys() if chance.random() < 0.5]
            try:
                if refused:
                    await self.ask_once("POST", f"{where}/nack", {"leases": refused})
                if not done:
                    continue
                for receipt in done.values():
                    receipt.ack_asked = True
                _, answer = await self.ask_once("POST", f"{where}/ack", {"leases": list(done)})
            except UnansweredError:
                continue
            expired = set(answer["expired"])
            for lease, receipt in done.items():
                receipt.ack_asked = False
                if lease not in expired:
                    receipt.acknowledged(self.ledger.now_ms())
                    self.counts["acknowledged"] += 1


def document_of(order: Order, **when: int) -> dict[str, object]:
    """What publishes it."""
    document: dict[str, object] = {"subject": order.subject, "body": order.body, **when}
    if order.key is not None:
        document["key"] = order.key
    return document
