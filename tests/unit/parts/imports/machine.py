"""A machine with a server on it, on which tables are staged and adopted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.imports.imports import Import, Imports
from delayserver.parts.imports.worker import ImporterThread
from delayserver.records.message import Payload, State
from delayserver.records.subscriptions import Subscription
from storage.rows import HOUR_MS
from storage.staging import manifest_path
from tests.world import Ledger, SimulatedClock, SimulatedServer
from tests.world.durable import StagedRow
from tests.world.publishes import publish_all
from tests.world.server import stage
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

SUBJECT = "coupon"
HOOK = Subscription(id=1, name="hook", subject="*", type="webhook", created_ms=0)
Row = tuple[int, str | None, str]
"""Due in so many ms, key, body."""


class Machine:
    """A machine with a server on it, moved by hand, and a ledger of what was promised."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**{"segment_bytes": 4096, "disk_reserve_bytes": 0, **settings})
        self.disk = SimulatedFiles(rng=random.Random(1))
        self.catalog = MemoryCatalog()
        self.clock = SimulatedClock()
        self.ledger = Ledger()
        self.faults = Faults()
        self.answers: dict[str, Import | Exception] = {}
        self.start()
        registry = self.server.engine.registry
        registry.next_id()
        self.server.engine.subscribing.put_subscription(HOOK)
        self.server.engine.part(Imports).begin([SUBJECT])
        self.server.rest()

    def start(self) -> None:
        self.ledger.new_life()
        self.catalog.faults = self.faults
        files = FaultyFiles(self.disk, self.faults)
        self.server = SimulatedServer(
            self.settings, files, self.catalog, self.clock, random.Random(2), self.ledger
        )
        self.ledger.recovered(self.server)

    def restart(self, *, power_loss: bool = False) -> None:
        self.disk = self.disk.crash() if power_loss else self.disk.kill()
        self.catalog = self.catalog.crash()
        self.faults = Faults()
        self.start()

    def stage(self, import_id: str, *rows: Row, parts: int = 1, **rest: Any) -> str:
        """Stage rows in due order; returns the path of the manifest."""
        number = self.server.engine.sequencer.subjects[SUBJECT]
        made = [
            StagedRow(self.clock.now_ms + in_ms, number, Payload(body.encode(), key=key))
            for in_ms, key, body in rows
        ]
        self.ledger.staged[import_id] = made
        size = -(-len(made) // parts)
        pieces: Sequence[Sequence[StagedRow]] = [
            made[at : at + size] for at in range(0, len(made), size)
        ]
        return stage(self.disk, import_id, pieces, self.server.engine.messages.key_hash, **rest)

    def adopt(self, import_id: str) -> None:
        def done(found: Import | None, error: Exception | None) -> None:
            self.answers[import_id] = found or error or AssertionError("no answer")
            if found is not None:
                self.ledger.adopted(import_id, found.first_seq)

        self.server.engine.part(Imports).adopt(manifest_path(import_id), done)

    def load(self, import_id: str, *rows: Row, **rest: Any) -> Import:
        """Stage and adopt; everything is filed on return."""
        self.stage(import_id, *rows, **rest)
        self.adopt(import_id)
        self.rest()
        return self.adopted(import_id)

    def adopted(self, import_id: str) -> Import:
        answer = self.answers[import_id]
        assert isinstance(answer, Import), answer
        return answer

    def rest(self) -> None:
        """Everybody works, a checkpoint included."""
        for _ in range(3):
            self.clock.move(self.settings.checkpoint_ms)
            self.server.tick()
            self.server.rest()

    def verify(self) -> None:
        """Let the importer thread do its work, and the loop decide; nothing is committed."""
        self.server.run(self.server.worker(ImporterThread), 1)
        while self.server.turn():
            pass

    def commit(self) -> None:
        self.server.run(self.server.committer, 1)
        while self.server.turn():
            pass

    def file(self) -> None:
        self.server.run(self.server.replayer, 1000)
        while self.server.turn():
            pass

    def publish(self, key: str, body: str = "1", *, in_ms: int = 10 * HOUR_MS) -> tuple[int, bool]:
        """Seq, and whether it is a duplicate."""
        message = NewMessage(SUBJECT, self.clock.now_ms + in_ms, Payload(body.encode(), key=key))
        (published,) = publish_all(self.server.engine.publishing, [message], self.clock.now_ms)
        return self.server.engine.ids.decode(published.message_id).seq, published.duplicate

    def state(self, seq: int) -> State:
        due_ms = self.ledger.messages[seq].due_ms
        return self.server.engine.messages.locate(seq, due_ms).state

    def deliver_all(self) -> list[str]:
        """Let the webhook take messages until none is left. Returns their bodies, in order."""
        bodies: list[str] = []
        for _ in range(40):
            self.rest()
            while self.server.sending:
                (delivery,) = self.server.sending[0]
                bodies.append(delivery.payload.body.decode())
                self.ledger.returned(delivery, seen=True)
                self.server.answer([delivery], WebhookResponse(200))
                self.server.rest()
            self.clock.move(HOUR_MS // 2)
        return bodies


LATER: tuple[Row, ...] = tuple((2 * HOUR_MS + n * HOUR_MS, f"k{n}", f"{n}") for n in range(4))
