"""A small shop: unpaid orders are looked at after a while, unopened red envelopes go back.

    order.unpaid      one notice per order, by webhook; most orders get paid, which cancels theirs
    envelope.refund   one refund per envelope, pulled and acknowledged; some are opened in time

Seconds stand for minutes and hours. In the middle the server is struck while notices are being
published, cancelled and delivered. A server is killed with SIGKILL and started again; in a cluster
the owner of a shard is struck, and another one takes over (`servers`). A customer that gets no
answer asks again, with the same key, until there is one. A client has to do no more than that.

Cost: as long as it was told to take, and the strike. Threads: belongs to the event loop; the
server is another process.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from itertools import chain, repeat
from typing import Any

from delayserver.cli.demo.ledger import DemoLedger, Order
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.demo.receiver import Receiver
from delayserver.cli.demo.servers import DemoServer
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import Transport
from delayserver.errors import InputError
from delayserver.times import parse_time_ms

UNPAID = "order.unpaid"
REFUND = "envelope.refund"
SHOP = "shop"
"""The webhook subscription."""
WALLET = "wallet"
"""The pull subscription."""

PAID_SHARE = 0.6
OPENED_SHARE = 0.4
ENVELOPES_SHARE = 0.5
"""Envelopes per order."""
RETRY_WAITS_S = (0.05, 0.1, 0.2, 0.4)
ASK_S = 10.0
"""The longest time that an answer may take."""
POLL_S = 0.05
PULL_WAIT_MS = 2000
GRACE_S = 20.0
"""A message that is not delivered this long after its due time, or the restart, is lost."""
SETTLE_S = 0.5
"""The time after the last due time in which forbidden deliveries are still noticed."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The size and length of a run; the same seed plans the same."""

    orders: int = 200
    seconds: float = 8.0
    seed: int = 1


class DemoPhase(StrEnum):
    """How far the demo is."""

    STARTING = "starting the server"
    OPEN = "the shop is open"
    DOWN = "the server is struck"
    REOPENED = "the server is back; the shop goes on"
    WAITING = "all is published; waiting for the messages that are not due yet"
    DONE = "done"


class DemoShop:
    """One run of the demo."""

    def __init__(self, plan: DemoPlan, server: DemoServer) -> None:
        self.plan = plan
        self.server = server
        self.ledger = DemoLedger()
        self.phase = DemoPhase.STARTING
        self.doing = ""
        """The phase that the server reports while it is struck."""
        self.start_s = 0.0
        self.restart_s = 0.0
        self.payments_too_late = 0
        self.damage: list[str] | None = []
        """The damage that the final check of the files found; None: they are not ours to check."""
        self.unpaid, self.refund, self._shop, self._wallet = (
            name + server.suffix for name in (UNPAID, REFUND, SHOP, WALLET)
        )
        self._random = random.Random(plan.seed)
        self._last_due_ms = 0

    async def run(self) -> None:
        """Open, live, die, come back, and wait until everything is delivered.

        Raises ServerFailed."""
        server = self.server
        async with Receiver(self._on_notice) as receiver:
            with server.running():
                self.start_s = await server.start()
                self._client = server.connect()
                await self._subscribe(receiver.url)
                self.phase = DemoPhase.OPEN
                async with self._in_background(self._pull()):
                    async with asyncio.TaskGroup() as tasks:
                        for life in self._lives():
                            tasks.create_task(life)
                        await self._strike()
                    self.phase = DemoPhase.WAITING
                    await self._wait_for_the_rest()
                await self._unsubscribe()
                await self._client.close()
                self.damage = await server.end()
        self.phase = DemoPhase.DONE

    # ── the server ─────────────────────────────────────────────────────────────────────────────

    async def _strike(self) -> None:
        """Have the server struck in the middle."""
        await asyncio.sleep(self.plan.seconds * self._random.uniform(0.35, 0.5))
        self.phase, self.doing = DemoPhase.DOWN, self.server.down
        self.restart_s = await self.server.strike(self.ledger, self._tell)
        self.phase = DemoPhase.REOPENED

    def _tell(self, doing: str) -> None:
        self.doing = doing

    async def _subscribe(self, url: str) -> None:
        webhook = {
            "subject": self.unpaid,
            "type": "webhook",
            "url": url,
            "retry": {"backoff": ["1s"]},
        }
        await self._ask("PUT", path("subscriptions", self._shop), webhook)
        pull = {"subject": self.refund, "type": "pull", "lease": "10s"}
        await self._ask("PUT", path("subscriptions", self._wallet), pull)

    async def _unsubscribe(self) -> None:
        """Leave no subscriptions behind that only the shop needs."""
        for name in (self._shop, self._wallet):
            await self._ask("DELETE", path("subscriptions", name))

    async def _ask(
        self,
        method: str,
        where: str,
        document: object = None,
        *,
        timeout_s: float = ASK_S,
        waits_s: tuple[float, ...] = RETRY_WAITS_S,
    ) -> tuple[int, Any]:
        """Ask until there is an answer ("later" is none), less and less often."""
        for wait_s in chain(waits_s, repeat(waits_s[-1])):
            answered = await self._ask_once(method, where, document, timeout_s)
            if answered is not None:
                return answered
            await asyncio.sleep(wait_s * random.uniform(0.5, 1))
        raise AssertionError("there is always another attempt")

    async def _ask_once(
        self, method: str, where: str, document: object, timeout_s: float = ASK_S
    ) -> tuple[int, Any] | None:
        """None without an answer, or with "later": the server may have done it all the same."""
        try:
            status, answer = await call(self._client, method, where, document, timeout_s)
        except UnansweredError:
            return None
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return None
        if status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.CONFLICT:
            raise ServerFailed(f"{method} {where} was answered with {status}: {answer}")
        return status, answer

    # ── orders and envelopes ───────────────────────────────────────────────────────────────────

    def _lives(self) -> list[Coroutine[None, None, None]]:
        """The life of every order and envelope, planned with the seed before anything begins."""
        envelopes = round(self.plan.orders * ENVELOPES_SHARE)
        lives = [self._life(self.unpaid, self._shop, PAID_SHARE) for _ in range(self.plan.orders)]
        lives += [self._life(self.refund, self._wallet, OPENED_SHARE) for _ in range(envelopes)]
        return lives

    def _life(
        self, subject: str, subscription: str, cancelled_share: float
    ) -> Coroutine[None, None, None]:
        seconds, chance = self.plan.seconds, self._random
        begin_s = seconds * chance.uniform(0, 0.6)
        delay_ms = round(1000 * seconds * chance.uniform(0.15, 0.4))
        # Some pay a moment too late; then the notice is on its way, and the answer says so.
        pay_s = delay_ms / 1000 * chance.uniform(0, 1.05)
        pays = chance.random() < cancelled_share
        order = self.ledger.order(subject, (subscription,))
        return self._live(order, begin_s, delay_ms, pay_s if pays else None)

    async def _live(self, order: Order, begin_s: float, delay_ms: int, pay_s: float | None) -> None:
        await asyncio.sleep(begin_s)
        await self._publish(order, delay_ms)
        if pay_s is not None:
            await asyncio.sleep(pay_s)
            await self._pay(order)

    async def _publish(self, order: Order, delay_ms: int) -> None:
        self.ledger.publish_asked(order, delay_ms)
        document = {
            "subject": order.subject,
            "key": order.key,
            "body": order.body,
            "delay": delay_ms,
        }
        _, answer = await self._ask("POST", path("messages"), document)
        due_ms = due_of(answer)
        self.ledger.publish_answered(order, answer["id"], due_ms)
        self._last_due_ms = max(self._last_due_ms, due_ms)

    async def _pay(self, order: Order) -> None:
        assert order.key is not None
        order.cancel_asked = True
        status, _ = await self._ask("DELETE", path("subjects", order.subject, "keys", order.key))
        order.cancel_asked = False
        if status == HTTPStatus.OK:
            order.cancelled_ms = self.ledger.now_ms()
        else:
            self.payments_too_late += 1

    # ── the receivers ──────────────────────────────────────────────────────────────────────────

    async def _on_notice(self, headers: Mapping[str, str], body: bytes) -> int:
        message_id = headers.get("webhook-id", "")
        self.ledger.receive(self._shop, message_id, parse_json(body), settled=True)
        return HTTPStatus.OK

    async def _pull(self) -> None:
        """Pull refunds and acknowledge them, until it is cancelled."""
        request = {"max": 100, "wait": PULL_WAIT_MS}
        subscription = path("subscriptions", self._wallet)
        timeout_s = PULL_WAIT_MS / 1000 + 10
        while True:
            # Only the wallet pulls, so it must be there as soon as the server is.
            _, answer = await self._ask(
                *("POST", f"{subscription}/pull", request), timeout_s=timeout_s, waits_s=(POLL_S,)
            )
            await take(self.ledger, self._wallet, answer["messages"], self._ack)

    async def _ack(self, leases: list[str]) -> dict[str, bool | None]:
        where = path("subscriptions", self._wallet) + "/ack"
        document = {"leases": leases}
        answered = await self._ask_once("POST", where, document)
        # A server that died may have recorded it before: "expired" says nothing more then.
        refused = None if answered is None else False
        _, answer = answered or await self._ask("POST", where, document)
        return {lease: refused if lease in answer["expired"] else True for lease in leases}

    async def _wait_for_the_rest(self) -> None:
        last_ms = max([self._last_due_ms, *(outage.up_ms for outage in self.ledger.outages)])
        deadline_ms = last_ms + GRACE_S * 1000
        settled_ms = last_ms + SETTLE_S * 1000
        while (now_ms := self.ledger.now_ms()) < deadline_ms:
            if now_ms >= settled_ms and not self.ledger.open_count:
                break
            await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def _in_background(self, work: Coroutine[None, None, None]) -> AsyncIterator[None]:
        """Run `work` for as long as the block lasts; its failure is raised at the end."""
        task = asyncio.create_task(work)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


def due_of(answer: Any) -> int:
    """`deliver_at` of an answer in ms. Raises ServerFailed if there is none."""
    try:
        return parse_time_ms(answer["deliver_at"])
    except (InputError, KeyError, TypeError) as error:
        raise ServerFailed(f"an answer without deliver_at: {answer!r}") from error


async def call(
    transport: Transport,
    method: str,
    where: str,
    document: object = None,
    timeout_s: float = ASK_S,
) -> tuple[int, Any]:
    """Status and document of one answer. Raises UnansweredError, for an answer that was cut off as
    well: the server may have done it, or not."""
    body = None if document is None else json.dumps(document).encode()
    answer = await transport.request(method, where, body, timeout_s=timeout_s)
    return answer.status, json.loads(answer.body) if answer.body else None


def parse_json(body: bytes) -> object:
    """A delivered body; None if it is not JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


async def take(
    ledger: DemoLedger,
    subscription: str,
    messages: list[dict[str, Any]],
    ack: Callable[[list[str]], Awaitable[Mapping[str, bool | None]]],
) -> None:
    """Write pulled messages down, acknowledge them, and write down for each lease whether the
    server says that it was recorded; None if it may have been."""
    receipts = {
        message["lease"]: ledger.receive(
            subscription, message["id"], message.get("body"), settled=False
        )
        for message in messages
    }
    if not receipts:
        return
    for receipt in receipts.values():
        receipt.ack_asked = True
    for lease, is_recorded in (await ack(list(receipts))).items():
        receipts[lease].ack_asked = is_recorded is None
        if is_recorded:
            receipts[lease].acknowledged(ledger.now_ms())
