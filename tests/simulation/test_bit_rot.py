"""Every byte of a small data directory is damaged, one at a time (I8).

Then the server starts. It must deliver exactly what it would have delivered, or name a damaged
place; it never delivers something else, never keeps silent about what is missing, and always comes
up."""

import random
from dataclasses import dataclass, field

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import Subscription
from delayserver.server.filer import CheckpointRequest
from storage.directory import LOG_DIRECTORIES
from storage.errors import DamageError
from storage.rows import HOUR_MS
from tests.depth import every
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(
    segment_bytes=4096, checkpoint_ms=60_000, lead_ms=100, settle_sync_ms=0, group_max_bytes=1 << 20
)
HOOK = Subscription(id=1, name="hook", subject="a", type="webhook", created_ms=0)
OTHER = Subscription(id=2, name="other", subject="*", type="webhook", created_ms=0)

Receipt = tuple[str, str, bytes]
"""Subscription, subject and body."""


@dataclass
class Receiver(Observer):
    """Takes everything, and remembers it."""

    receipts: set[Receipt] = field(default_factory=set)
    damage: list[DamageError] = field(default_factory=list)

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        self.receipts.add((subscription.name, delivery.subject, delivery.payload.body))

    def damaged(self, error: DamageError) -> None:
        self.damage.append(error)


@dataclass
class Directory:
    """A directory as a killed server left it: some filed, some not, some delivered, some not."""

    disk: SimulatedFiles
    catalog: MemoryCatalog
    now_ms: int

    def start(self, disk: SimulatedFiles, receiver: Receiver) -> SimulatedServer:
        clock = SimulatedClock(self.now_ms)
        catalog = self.catalog.crash()
        return SimulatedServer(SETTINGS, disk, catalog, clock, random.Random(0), receiver)


def work(server: SimulatedServer, *, answer: bool = True) -> None:
    server.rest()
    while answer and server.sending:
        server.answer(server.sending[0], WebhookResponse(200))
        server.rest()


def publish(server: SimulatedServer, subject: str, *due_times: int) -> None:
    publish_all(
        server.engine.publishing,
        [NewMessage(subject, due, Payload(f'"{subject}{due}"'.encode())) for due in due_times],
        server.clock(),
    )
    work(server)


def make_directory() -> Directory:
    clock, receiver = SimulatedClock(), Receiver()
    disk, catalog = SimulatedFiles(rng=random.Random(0)), MemoryCatalog()
    server = SimulatedServer(SETTINGS, disk, catalog, clock, random.Random(0), receiver)
    for subscription in (HOOK, OTHER):
        server.engine.registry.next_id()
        server.engine.subscribing.put_subscription(subscription)
        work(server)
    now_ms = clock.now_ms
    publish(server, "a", now_ms + 1, now_ms + 2, now_ms + 100)
    publish(server, "b", now_ms + 2, now_ms + HOUR_MS)
    clock.move(3)
    server.tick()
    work(server)
    clock.move(SETTINGS.checkpoint_ms - HOUR_MS // 60)
    server.replayer.put(CheckpointRequest(lambda: None))
    work(server)
    publish(server, "a", now_ms + 101, now_ms + HOUR_MS + 1)
    publish(server, "c", now_ms + 102)
    publish(server, "c", now_ms + 103)
    server.settler.sync()
    return Directory(disk.crash(), catalog, now_ms + 2 * HOUR_MS)


DIRECTORY = make_directory()


def deliver_all(disk: SimulatedFiles) -> tuple[Receiver, bool]:
    """What is delivered, and whether a damaged place was named."""
    receiver = Receiver()
    server = DIRECTORY.start(disk, receiver)
    server.tick()
    work(server)
    server.tick()
    work(server)
    recovered = server.recovered
    return receiver, bool(recovered.damage or recovered.torn or receiver.damage)


def contents() -> dict[str, bytes]:
    """The files of the four logs."""
    disk = DIRECTORY.disk.crash()
    found = {}
    for directory in LOG_DIRECTORIES:
        for name in disk.list(directory):
            if "spare" not in name:
                file = disk.open(f"{directory}/{name}")
                found[file.path] = file.pread(file.size(), 0)
    return found


def offsets(data: bytes) -> list[int]:
    """All, but most of the zeros at the end of a segment that is not full."""
    used = len(data.rstrip(b"\0"))
    return [*range(min(used + 16, len(data))), *range(used + 16, len(data), 97)]


CONTENTS = contents()
EXPECTED, _ = deliver_all(DIRECTORY.disk.crash())


def test_the_directory_has_everything() -> None:
    assert {path.split("/")[0] for path in CONTENTS} == {*LOG_DIRECTORIES}
    assert len(EXPECTED.receipts) == 9
    receiver, is_named = deliver_all(DIRECTORY.disk.crash())
    assert receiver.receipts == EXPECTED.receipts and not is_named


@pytest.mark.timeout(600)
@pytest.mark.unchecked("every store has a flipped bit")
@pytest.mark.parametrize("path", CONTENTS)
def test_every_byte(path: str) -> None:
    everything = EXPECTED.receipts | {
        ("hook", "a", b'"a%d"' % (DIRECTORY.now_ms - 2 * HOUR_MS + n)) for n in (1, 2)
    }
    everything |= {("other", subject, body) for _, subject, body in set(everything)}
    everything |= {("other", "b", b'"b%d"' % (DIRECTORY.now_ms - 2 * HOUR_MS + 2))}
    for offset in every(7, offsets(CONTENTS[path])):
        disk = DIRECTORY.disk.crash()
        file = disk.open(path)
        before = CONTENTS[path][offset]
        file.pwrite([bytes([before ^ (1 << offset % 8)])], offset)
        file.fdatasync()
        receiver, is_named = deliver_all(disk)
        if receiver.receipts != EXPECTED.receipts:
            assert is_named, (
                f"{path}@{offset}: silence about {EXPECTED.receipts - receiver.receipts}"
            )
        garbage = {
            receipt
            for receipt in receiver.receipts - everything
            if not receipt[1].startswith("(lost subject")
        }
        assert not garbage, f"{path}@{offset}: {garbage}"
