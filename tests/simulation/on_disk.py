"""A small data directory on a real disk, as a killed server left it, with everything in it.

Filed in several steps and not filed yet; delivered, failed, dead, cancelled, moved, under a key.
The catalog is LMDB's. `deliver_all` starts a server on a directory and returns what comes of it.
"""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule
from delayserver.parts.sources.records import SourceRecord
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.records.message import DueDelivery, Payload, Watch
from delayserver.records.subscriptions import KafkaTarget, Subscription
from delayserver.server.filer import CheckpointRequest
from delayserver.times import format_time
from storage.buckets import DAY_MS
from storage.catalog import LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, LOG_DIRECTORIES
from storage.errors import DamageError
from storage.files import OsFiles
from storage.key_runs import DIRECTORY as KEYS_DIRECTORY
from storage.rows import HOUR_MS
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.server import START_MS

SETTINGS = Settings(
    segment_bytes=4096, checkpoint_ms=60_000, lead_ms=100, settle_sync_ms=0, group_max_bytes=1 << 20
)
CATALOG_BYTES = 1 << 24
HOOK = Subscription(
    id=1, name="hook", subject="a", type="webhook", created_ms=0, max_attempts=2, backoff_ms=(900,)
)
OTHER = Subscription(id=2, name="other", subject="*", type="webhook", created_ms=0, max_attempts=1)
END_MS = START_MS + 2 * HOUR_MS
FAR_MS = START_MS + 3 * DAY_MS
"""What is due then is filed by day."""

Receipt = tuple[str, bytes]
"""Subscription and body."""


@dataclass
class Receiver(Observer):
    """Takes everything, and remembers it."""

    receipts: list[Receipt] = field(default_factory=list)
    damage: list[DamageError] = field(default_factory=list)

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        self.receipts.append((subscription.name, delivery.payload.body))

    def damaged(self, error: DamageError) -> None:
        self.damage.append(error)


class Life:
    """A server on a real directory."""

    def __init__(self, directory: Path, now_ms: int = START_MS) -> None:
        self.clock, self.receiver = SimulatedClock(now_ms), Receiver()
        files = OsFiles(str(directory))
        files.make_directory(CATALOG_DIRECTORY)
        path = str(directory / CATALOG_DIRECTORY)
        self.catalog = LmdbCatalog(path, max_bytes=CATALOG_BYTES)
        try:
            self.server = SimulatedServer(
                SETTINGS, files, self.catalog, self.clock, random.Random(0), self.receiver
            )
        except BaseException:
            self.catalog.close()
            raise

    def end(self) -> None:
        """As SIGKILL does it: nothing is written any more."""
        self.server.close()
        self.catalog.close()

    def work(self, statuses: list[int] | None = None) -> None:
        self.server.tick()
        self.server.rest()
        while self.server.sending:
            status = statuses.pop(0) if statuses else 200
            self.server.answer(self.server.sending[0], WebhookResponse(status))
            self.server.rest()

    def publish(
        self, subject: str, *due_times: int, key: str | None = None, watch: Watch | None = None
    ) -> list[int]:
        payloads = [Payload(body(subject, due), key=key, watch=watch) for due in due_times]
        published = publish_all(
            self.server.engine.publishing,
            [NewMessage(subject, *one) for one in zip(due_times, payloads, strict=True)],
            self.clock.now_ms,
        )
        self.server.rest()
        return [self.server.engine.ids.decode(one.message_id).seq for one in published]

    def checkpoint(self) -> None:
        self.server.replayer.put(CheckpointRequest(lambda: None))
        self.server.rest()


def body(subject: str, due_ms: int) -> bytes:
    # Long enough for a second segment: the first one is deleted behind a checkpoint.
    return b'"%s%d %s"' % (subject.encode(), due_ms - START_MS, b"." * 150)


CANCELLED = {
    *(body("a", START_MS + HOUR_MS + n) for n in (10, 11, 12)),
    body("a", FAR_MS + 3),
}
"""Cancels that were answered."""
BODIES = CANCELLED | {
    *(body("a", START_MS + n) for n in (1, 2)),
    *(body("a", START_MS + HOUR_MS + n) for n in (5, 13, 14, 16)),
    *(body("b", START_MS + n) for n in (2, HOUR_MS + 1)),
    *(body("c", START_MS + n) for n in (600,)),
    *(body("d", START_MS + HOUR_MS + n) for n in (15,)),
    *(body("e", START_MS + HOUR_MS + n) for n in (17, 18, 19)),
    *(body("a", FAR_MS + n) for n in (1, 2, HOUR_MS)),
}
"""All that was published."""


def make_directory(directory: Path) -> None:
    """Everything a small directory can hold."""
    life = Life(directory)
    server, now_ms = life.server, START_MS
    for subscription in (HOOK, OTHER):
        server.engine.registry.next_id()
        server.engine.subscribing.put_subscription(subscription)
        life.work()
    next_ms = now_ms + HOUR_MS
    life.publish("a", now_ms + 1, now_ms + 2)
    life.publish("b", now_ms + 2, next_ms + 1)
    first = life.publish("a", next_ms + 10, next_ms + 11, next_ms + 13)
    life.publish("a", next_ms + 5, key="k5")
    moved = life.publish("c", now_ms + 600)
    life.clock.move(3)
    # One is delivered, one fails at its first subscriber, one dies at its second.
    life.work([200, 200, 500, 500])
    life.checkpoint()
    life.publish("a", FAR_MS + 1, key="far")
    life.publish("a", FAR_MS + HOUR_MS)
    cancel = server.engine.messages.cancel
    assert cancel(first[0], next_ms + 10) is not None
    life.server.rest()
    server.engine.messages.move(
        moved[0], now_ms + 600, next_ms + 20, Payload(body("c", now_ms + 600)), 3
    )
    life.publish("a", next_ms + 14, key="k14")
    far = life.publish("a", FAR_MS + 2, FAR_MS + 3)
    assert cancel(far[1], FAR_MS + 3) is not None
    life.checkpoint()
    # Its time never comes: it begins anew with each start.
    server.engine.part(Heartbeats).put("h", 10 * HOUR_MS, "d", Payload(b"1"), now_ms)
    # Nor does that of a schedule, but somebody has it run now.
    payload = Payload(body("e", next_ms + 18))
    far_ms = now_ms + 300 * DAY_MS
    wanted = WantedSchedule("s", "e", payload, "@daily", 0, "Europe/Berlin", start_ms=far_ms)
    server.engine.part(Scheduling).put(wanted, now_ms)
    server.engine.part(Scheduling).trigger("s", now_ms)
    # Nobody reads the topic of a source, but a record of it has been taken.
    topic = KafkaTarget("127.0.0.1:9", "t")
    source, _, _ = server.engine.part(Sourcing).put(
        WantedSource("q", "e", topic, "delay-until", "g"), now_ms
    )
    due = (("delay-until", format_time(next_ms + 19).encode()),)
    record = SourceRecord(0, 7, b"k", body("e", next_ms + 19), due)
    assert server.engine.part(Sourcing).take("q", source.state.version, [record], now_ms)
    life.publish("d", next_ms + 15, key="k15", watch=Watch(("order 1",)))
    assert cancel(first[1], next_ms + 11) is not None
    life.checkpoint()
    while server.replay.tidy():
        pass  # The keys so far go into a run.
    last = life.publish("a", next_ms + 12, next_ms + 16)
    assert cancel(last[0], next_ms + 12) is not None
    life.publish("e", next_ms + 17)
    life.work()
    server.settler.sync()
    life.end()


def deliver_all(directory: Path) -> Receiver:
    """What a server delivers that starts two hours later, and until what is far is due."""
    life = Life(directory, END_MS)
    for _ in range(4):
        life.work()
        life.clock.move(1000)
    # No heartbeat ends meanwhile.
    life.clock.set(FAR_MS + 2 * HOUR_MS - END_MS)
    for _ in range(4):
        life.work()
        life.clock.move(1000)
    life.end()
    return life.receiver


def copy(directory: Path, target: Path) -> Path:
    """A directory to be damaged."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(directory, target)
    return target


def flip(directory: Path, path: str, offset: int) -> None:
    """One bit of one byte."""
    with (directory / path).open("r+b") as file:
        file.seek(offset)
        (before,) = file.read(1)
        file.seek(offset)
        file.write(bytes([before ^ (1 << offset % 8)]))


def files(directory: Path) -> list[str]:
    """The files of logs and catalog."""
    found = [
        str(path.relative_to(directory))
        for name in (*LOG_DIRECTORIES, CATALOG_DIRECTORY, KEYS_DIRECTORY)
        for path in sorted((directory / name).iterdir())
    ]
    return [path for path in found if "spare" not in path and "lock" not in path]
