"""Traffic of the soak: good clients that do everything at once, and bad clients beside them.

Besides the clients of `tests.harness.traffic` there are batches of MessagePack, replacements by
key, look-ups, lists, messages due long after the end, a receiver that always refuses (dead
letters), and `tests.soak.abuse`. At the end the far messages have to be known.

Cost: some 150 messages a second, half a core. Threads: the event loop.
"""

import json
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from delayserver.cli.demo.ledger import Order
from delayserver.cli.demo.shop import call, due_of
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from tests.harness.traffic import (
    HOOK,
    HOUR_MS,
    SUBSCRIBERS,
    RefusedError,
    Traffic,
    before_retry,
    document_of,
    pause,
)
from tests.soak import abuse
from tests.soak.weather import TOKEN, WeatherServer

DEAD = "load.dead"
BAD_CLIENTS = 3
LONGEST_MS = 60_000
"""The longest delay but for those of far messages."""
FAR_SHARE = 0.03


class SoakTraffic(Traffic):
    """Good and bad clients of one server."""

    PUBLISHERS = 6
    PAUSE_S = 0.08
    subscribers: Mapping[str, tuple[str, ...]] = {**SUBSCRIBERS, DEAD: ("dead",)}
    subjects = (*SUBSCRIBERS, *SUBSCRIBERS, *SUBSCRIBERS, DEAD)

    def __init__(self, server: WeatherServer, seed: int, *, pause_s: float) -> None:
        """`pause_s`: of a bad client between two deeds, at most."""
        super().__init__(server.notes, server.client, seed)
        self._server = server
        self._pause_s = pause_s
        self._statuses: Counter[int] = Counter()
        """Answers to bad clients, by status."""

    def writers(self) -> list[Coroutine[Any, Any, None]]:
        more = [self._look_up(), self._replace(), self._publish_packed()]
        chances = [random.Random(self._random.random()) for _ in range(BAD_CLIENTS)]
        bad = [abuse.misbehave(self._target(chance), self._pause_s) for chance in chances]
        return [*super().writers(), *more, *bad]

    def _target(self, chance: random.Random) -> abuse.Target:
        server = self._server
        return abuse.Target(
            *(server.port, server.tls, TOKEN, server.narrow_token, chance),
            *(self.counts, self._statuses, self.notes.fail, self._unknown),
        )

    async def subscribe(self, url: str) -> None:
        await super().subscribe(url)
        retry = {"max_attempts": 2, "backoff": ["100ms"]}
        document = {"subject": DEAD, "type": "webhook", "url": url + "dead", "retry": retry}
        await self.ask("PUT", path("subscriptions", "dead"), document)

    async def on_webhook(self, headers: Mapping[str, str], body: bytes) -> int:
        if headers.get("delay-subject") != DEAD:
            return await super().on_webhook(headers, body)
        message_id = headers.get("webhook-id", "")
        self.ledger.receive("dead", message_id, json.loads(body), settled=False)
        return HTTPStatus.INTERNAL_SERVER_ERROR

    def _delay_ms(self) -> int:
        chance = self._random
        kind = chance.random()
        if kind < FAR_SHARE:
            return 3 * HOUR_MS + chance.randint(0, HOUR_MS)
        if kind < 0.1:
            return 0
        longest_ms = 3000 if kind < 0.5 else LONGEST_MS
        return chance.randint(1, longest_ms)

    def _when(self, delay_ms: int) -> dict[str, int]:
        # A delay would count from whenever the server hears of it, by a clock that may be set.
        return {"deliver_at": self.ledger.server_ms() + delay_ms}

    def _is_refusal(self, status: int, answer: Any) -> bool:
        self.counts[f"answered {status}"] += 1
        if status == HTTPStatus.INTERNAL_SERVER_ERROR and self._server.read_faults:
            return bool(answer["type"].endswith("damaged"))
        is_full = status == HTTPStatus.INSUFFICIENT_STORAGE
        return is_full or super()._is_refusal(status, answer)

    # ── more clients ───────────────────────────────────────────────────────────────────────────

    def _unknown(self) -> bytes:
        """A message of a bad client."""
        order, delay_ms = self._new_order()
        self.ledger.publish_asked(order, delay_ms)
        self.counts["published by bad clients, outcome unknown"] += 1
        return json.dumps(document_of(order, delay=delay_ms)).encode()

    async def _publish_packed(self) -> None:
        """Publish batches of MessagePack now and then."""
        while True:
            await pause(self._random, 0, 2)
            await self._publish_batch(is_packed=True)
            self.counts["batches of MessagePack"] += 1

    async def _replace(self) -> None:
        """Push a timer back, again and again, and then leave it alone."""
        chance = self._random
        while True:
            order: Order | None = None
            for _ in range(chance.randint(2, 5)):
                order = await self._push_back(order)
                await pause(chance, 0, 0.5)

    async def _push_back(self, before: Order | None) -> Order:
        order = self.ledger.order(HOOK, SUBSCRIBERS[HOOK])
        if before is not None:
            order.key = before.key
            before.cancel_asked = True
        assert order.key is not None
        self.ledger.publish_asked(order, self._random.randint(100, 5000))
        document = {"body": order.body, "deliver_at": order.earliest_ms}
        while True:
            try:
                where = path("subjects", HOOK, "keys", order.key)
                status, answer = await self.ask_once("PUT", where, document)
                break
            except RefusedError:
                await before_retry()
            except UnansweredError:
                return order
        if before is not None:
            before.cancel_asked = False
            if status == HTTPStatus.OK:
                before.cancelled_ms = self.ledger.now_ms()
                self.counts["replaced"] += 1
        self.ledger.publish_answered(order, answer["id"], due_of(answer))
        return order

    async def _look_up(self) -> None:
        """Look at single messages, lists and statistics."""
        chance = self._random
        while True:
            await pause(chance, 0, 0.2)
            where = chance.choice(("/v1/stats", "/v1/forecast", "/metrics", "list", "one", "one"))
            if where in ("list", "one"):
                if not self.ledger.orders:
                    continue
                order = chance.choice(self.ledger.orders)
                where = path("subjects", order.subject, "messages") + "?limit=20"
                if chance.random() < 0.67:
                    where = path("messages", min(order.message_ids, default="none"))
            answer = await self.client.request("GET", where)
            self.counts["looked up"] += 1
            is_strange = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if is_strange and not self._is_refusal(answer.status, json.loads(answer.body)):
                self.notes.fail(f"GET {where}: {answer.status} {answer.body[:300]!r}")

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def followed(self, timeout_s: float) -> None:
        await super().followed(timeout_s)
        self.counts.update({f"bad clients answered {s}": n for s, n in self._statuses.items()})
        if self._statuses[500] and not self._server.read_faults:
            self.notes.fail(f"{self._statuses[500]} bad clients were answered 500")

    async def read(self) -> None:
        """Read the messages that the receiver that always refuses has been spared further."""
        by_id = {
            message_id: order
            for order in self.ledger.orders
            if order.subject == DEAD and not order.is_settled("dead")
            for message_id in order.message_ids
        }
        cursor = None
        while by_id:
            query = "?limit=1000" + (f"&cursor={cursor}" if cursor else "")
            where = path("subscriptions", "dead", "dead-letters") + query
            _, answer = await self.ask("GET", where)
            for letter in answer["dead_letters"]:
                order = by_id.get(letter["id"])
                if order is not None and (receipts := order.receipts.get("dead")):
                    receipts[-1].settled_ms = self.ledger.now_ms()
                    self.counts["dead letters"] += 1
            cursor = answer["cursor"]
            if cursor is None:
                return

    async def look(self) -> None:
        """Ask for each message that is not due yet: it has to be known."""
        for order in self.ledger.pending():
            # A move without an answer may have made it due.
            where = path("messages", min(order.message_ids))
            status, answer = await call(self.client, "GET", where)
            if status != HTTPStatus.OK or answer["state"] not in ("scheduled", "delivering"):
                told = f"{order.to_json()}: {status} {answer}"
                self.notes.fail(f"not due yet, and not known: {told}")
            self.counts["still pending"] += 1
