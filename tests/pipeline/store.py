"""Data directories that the real code made: the simulation's server, on real files."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.redriving import Replayable
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import Payload, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from storage.buckets import bucket_path
from storage.catalog import LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, open_identity
from storage.files import OsFiles
from storage.rows import HOUR_MS, LogKind
from storage.shards import fix_shard_count, shard_directory
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all

HOUR = 494_500
START_MS = HOUR * HOUR_MS
OK = WebhookResponse(200)
FAILED = WebhookResponse(500)

Answer = Callable[[str], WebhookResponse]
"""What a subscriber says, by the subject."""


class Store:
    """A server whose clock stands until it is moved, and its directory."""

    def __init__(self, root: Path, *, shard: int = 0, **settings: Any) -> None:
        self.root = str(root)
        self.settings = Settings(**{"segment_bytes": 1 << 16, **settings})
        self.clock = SimulatedClock(START_MS)
        self._shard = shard
        self._catalog_path = str(root / CATALOG_DIRECTORY)
        self._rng = random.Random(7 + shard)
        files = OsFiles(self.root)
        open_identity(files, random_bytes=self._rng.randbytes, shard=shard)
        files.make_directory(CATALOG_DIRECTORY)
        self.server = self._start()

    def _start(self) -> SimulatedServer:
        self._catalog = LmdbCatalog(self._catalog_path, max_bytes=1 << 26)
        return SimulatedServer(
            self.settings,
            OsFiles(self.root),
            self._catalog,
            self.clock,
            self._rng,
            Observer(),
            shard=self._shard,
        )

    def stop(self) -> None:
        """End in good order."""
        self.server.stop()
        self._catalog.close()

    def kill(self) -> None:
        """End at once: what is not filed stays so."""
        self.server.close()
        self._catalog.close()

    def start(self) -> None:
        """Begin again."""
        self.server = self._start()

    def restart(self) -> None:
        """End and begin again."""
        self.stop()
        self.start()

    def subscribe(self, name: str, subject: str, **definition: Any) -> Subscription:
        """A webhook subscription that exists from now on."""
        registry = self.server.engine.registry
        made = Subscription(
            **{
                "id": registry.next_id(),
                "name": name,
                "subject": subject,
                "type": "webhook",
                "created_ms": self.clock.now_ms,
                "max_attempts": 2,
                "backoff_ms": (1000,),
                **definition,
            }
        )
        return self.change(made)

    def change(self, subscription: Subscription, **changes: Any) -> Subscription:
        """Change or (deleted=True) delete a subscription."""
        changed = msgspec.structs.replace(subscription, **changes)
        self.server.engine.subscribing.put_subscription(changed)
        self.server.rest()
        return self.server.engine.registry.by_id(changed.id) or changed

    def publish(self, subject: str, due_in_ms: Sequence[int], **payload: Any) -> list[int]:
        """Messages, due so many ms after START_MS; their seqs."""
        messages = [
            NewMessage(subject, START_MS + due_ms, Payload(b'{"n": %d}' % due_ms, **payload))
            for due_ms in due_in_ms
        ]
        published = publish_all(self.server.engine.publishing, messages, self.clock.now_ms)
        self.server.rest()
        return [self.server.engine.ids.decode(one.message_id).seq for one in published]

    def cancel(self, seq: int, due_in_ms: int) -> None:
        """Cancel a message that was published."""
        group: Group | None = self.server.engine.messages.cancel(seq, START_MS + due_in_ms)
        assert group is not None
        self.server.rest()

    def move(self, seq: int, due_in_ms: int, new_due_in_ms: int, subject: str) -> None:
        """Give a message another due time."""
        engine = self.server.engine
        payload = Payload(b'{"n": %d}' % due_in_ms)
        engine.messages.move(
            seq,
            START_MS + due_in_ms,
            START_MS + new_due_in_ms,
            payload,
            engine.sequencer.subjects[subject],
        )
        self.server.rest()

    def replay(self, seq: int, due_in_ms: int, subscription_id: int) -> None:
        """Have a message delivered again that is settled."""
        engine = self.server.engine
        subject_id, due_ms = 1, START_MS + due_in_ms
        entry = ScheduleEntry(seq, due_ms)
        payload = Payload(b'{"n": %d}' % due_in_ms)
        found = Replayable(seq, due_ms, subject_id, entry, due_ms, payload, ())
        engine.redriving.replay(found, [subscription_id], self.clock.now_ms)
        self.server.rest()

    def run(self, until_ms: int, answer: Answer = lambda subject: OK, late_ms: int = 3) -> None:
        """Let time pass to START_MS + until_ms; every webhook is answered after `late_ms`."""
        server, clock = self.server, self.clock
        end = START_MS + until_ms
        while True:
            server.rest()
            for deliveries in list(server.sending):
                clock.move(late_ms)
                server.answer(deliveries, answer(deliveries[0].subject))
                server.rest()
            wait_ms = server.tick()
            server.rest()
            if server.sending:
                continue
            if clock.now_ms >= end:
                return
            clock.move(max(1, min(wait_ms, end - clock.now_ms)))

    def checkpoint(self) -> None:
        """File everything, and retire what is done."""
        self.clock.move(self.settings.checkpoint_ms)
        self.server.tick()
        self.server.rest()
        self.server.run(self.server.replayer, 1000)
        self.server.rest()

    @contextlib.contextmanager
    def catalog(self) -> Iterator[LmdbCatalog]:
        """The catalog of a server that has ended."""
        catalog = LmdbCatalog(str(Path(self.root) / CATALOG_DIRECTORY), max_bytes=1 << 26)
        try:
            yield catalog
        finally:
            catalog.close()

    def path(self, kind: LogKind, hour: int = HOUR) -> Path:
        """The file of an hour."""
        return Path(self.root) / bucket_path(kind, hour)


def make_shards(root: Path, count: int = 3, **settings: Any) -> list[Store]:
    """The servers of a directory of several shards, which nothing was published to."""
    root.mkdir(parents=True, exist_ok=True)
    fix_shard_count(OsFiles(str(root)), count)
    return [Store(root / shard_directory(shard), shard=shard, **settings) for shard in range(count)]
