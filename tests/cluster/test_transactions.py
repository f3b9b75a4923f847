"""What is settled, in transactions on real brokers: committed, aborted, left open, taken over."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewTopic

from delayserver.delivery.replicated_settler import ReplicatedSettler
from storage.errors import FencedError
from storage.files import OsFiles
from storage.hour_log import HourLog
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.kafka_transactions import KafkaTransactions
from storage.replicated.settled import SettledLog
from storage.replicated.transactions import Aborted, Committed, TopicRecord
from storage.rows import LogKind
from tests.cluster.brokers import Brokers
from tests.cluster.topics import consumer_of
from tests.unit.fakes import HOUR, START_MS, dispatch_row
from tests.waiting import wait_until

STAMP = 77


class Shard:
    """What is settled of one shard, and a topic of somebody."""

    def __init__(self, brokers: Brokers, directory: Path) -> None:
        self.brokers = brokers
        self.engine = brokers.engine()
        self.url = self.engine.url
        self.topic = f"{self.url.name}.due"
        self._directory = directory
        self._count = 0
        made = brokers.admin.create_topics([NewTopic(self.topic, 1, 3)])
        made[self.topic].result()
        wait_until(lambda: self.topic in brokers.admin.list_topics(timeout=10).topics)

    def transactions(self) -> KafkaTransactions:
        """Opened: as by one more owner."""
        made = self.engine.transactions(0, STAMP)
        made.open()
        return made

    def settler(self, place: int = 0) -> ReplicatedSettler:
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        dispatch = HourLog(OsFiles(str(directory)), LogKind.DISPATCH, stamp=STAMP)
        log = partial(self.engine.settled, 0)
        return ReplicatedSettler(
            dispatch, lambda: SettledLog(log(), STAMP), place, lambda: int(time.monotonic() * 1000)
        )

    def records(self, *seqs: int) -> list[TopicRecord]:
        return [TopicRecord(self.topic, b"%d" % seq, None, []) for seq in seqs]

    def consumed(self) -> list[int]:
        """Of the topic, what is committed."""
        consumer = consumer_of(self.brokers, self.topic, {"enable.partition.eof": True})
        found: list[int] = []
        while True:
            message = consumer.poll(30)
            assert message is not None
            if message.error() is not None:
                consumer.close()
                return found
            found.append(int(message.value() or b""))


@pytest.fixture
def shard(brokers: Brokers, tmp_path: Path) -> Shard:
    return Shard(brokers, tmp_path)


def rows(*seqs: int) -> bytes:
    return b"".join(map(dispatch_row, seqs))


def filed(settler: ReplicatedSettler) -> list[int]:
    """The seqs that stand in its files, in their order."""
    frames = settler._dispatch.scan(HOUR)
    return [int(seq) for frame in frames for seq in frame.rows["seq"]]  # type: ignore[union-attr]


def read_to_end(settler: ReplicatedSettler) -> None:
    end = settler.end()
    assert end is not None
    wait_for(settler, lambda: settler.offset >= end)


def wait_for(settler: ReplicatedSettler, is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up_s
        settler.take_in(0.1)


def commit(transactions: KafkaTransactions, shard: Shard, *seqs: int) -> Committed | Aborted:
    return transactions.commit(seqs[0] % 4, shard.records(*seqs), rows(*seqs), START_MS)


def write(settler: ReplicatedSettler, *seqs: int) -> None:
    settler.write({HOUR: [rows(*seqs)]}, START_MS)
    settler.sync()


def test_all_that_is_committed_is_read_and_nothing_else(shard: Shard) -> None:
    transactions, owner, replica = shard.transactions(), shard.settler(), shard.settler()
    write(owner, 1)
    result = commit(transactions, shard, 2, 3)
    assert result == Committed(1)
    owner.write_recorded({HOUR: [rows(2, 3)]}, 1, START_MS)
    write(owner, 4)
    bad = [*shard.records(5), TopicRecord("not-there", b"6", None, [])]
    aborted = transactions.commit(1, bad, rows(5, 6), START_MS)
    assert isinstance(aborted, Aborted)
    assert list(aborted.refused) == [1]
    assert "topic" in aborted.refused[1]
    assert isinstance(commit(transactions, shard, 7), Committed)
    write(owner, 8)

    read_to_end(replica)
    assert filed(replica) == [1, 2, 3, 4, 7, 8]
    assert shard.consumed() == [2, 3, 7]
    # The owner's place comes behind the markers, and nothing is written twice.
    read_to_end(owner)
    # Nobody told it of 7: it has read that by the time it writes 8, or reads it later.
    assert filed(owner) in ([1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 8, 7])
    # Who begins anywhere in between reads what follows: also at a marker.
    for place in range(owner.offset + 1):
        again = shard.settler(place)
        read_to_end(again)
        assert set(filed(again)) <= {1, 2, 3, 4, 7, 8}
    transactions.close()


def test_the_place_of_an_owner_does_not_pass_what_is_not_in_its_files(shard: Shard) -> None:
    transactions, owner = shard.transactions(), shard.settler()
    assert isinstance(commit(transactions, shard, 1), Committed)
    # It is committed; the news of it is on its way to the settler, which goes on.
    write(owner, 2)
    assert owner.offset <= 0 or 1 in filed(owner)
    read_to_end(owner)
    owner.write_recorded({HOUR: [rows(1)]}, 0, START_MS)
    assert sorted(filed(owner)) == [1, 2]


def begin(transactions: KafkaTransactions, shard: Shard, *seqs: int) -> None:
    """A transaction that is written and not committed: its owner is killed, or stopped."""
    producer = transactions._producers[0]

    class Stopped:
        def __getattr__(self, name: str) -> object:
            return getattr(producer, name)

        def commit_transaction(self, timeout: float) -> None:
            raise InterruptedError

    transactions._producers[0] = Stopped()  # type: ignore[call-overload]
    with pytest.raises(InterruptedError):
        transactions.commit(0, shard.records(*seqs), rows(*seqs), START_MS)
    transactions._producers[0] = producer


def test_a_take_over_ends_what_was_left_open(shard: Shard) -> None:
    """The next owner reads nothing of it, but all that stands behind it."""
    first, owner = shard.transactions(), shard.settler()
    write(owner, 1)
    begin(first, shard, 2)
    # What is settled by itself stands behind the open transaction, and cannot be read yet.
    write(owner, 3)
    replica = shard.settler()
    wait_for(replica, lambda: replica.offset > 0)
    for _ in range(5):
        replica.take_in(0.1)
    assert filed(replica) == [1]
    end = replica.end()
    assert end is not None and replica.offset < end

    begun_s = time.monotonic()
    second = shard.transactions()
    read_to_end(replica)
    assert time.monotonic() - begun_s < 10
    assert filed(replica) == [1, 3]
    assert shard.consumed() == []
    # The zombie wakes.
    with pytest.raises(FencedError):
        commit_zombie(first)
    assert isinstance(commit(second, shard, 2), Committed)
    read_to_end(replica)
    assert filed(replica) == [1, 3, 2]
    assert shard.consumed() == [2]


def commit_zombie(transactions: KafkaTransactions) -> None:
    try:
        transactions._producers[0].commit_transaction(10)
    except KafkaException as error:
        transactions._abort(0, error.args[0], {})


def test_a_zombie_that_begins_anew_is_fenced(shard: Shard) -> None:
    first = shard.transactions()
    assert isinstance(commit(first, shard, 4), Committed)
    shard.transactions()
    with pytest.raises(FencedError):
        commit(first, shard, 8)
    assert shard.consumed() == [4]


def test_brokers_go_in_the_middle(shard: Shard) -> None:
    """A transaction waits for them; it is there once, or aborted and there not at all."""
    transactions = shard.transactions()
    assert isinstance(commit(transactions, shard, 1), Committed)
    leader = shard.brokers.leader(shard.url.settled_topic)
    shard.brokers.kill(leader)
    there = [1]
    try:
        for seq in range(2, 12):
            if isinstance(commit(transactions, shard, seq), Committed):
                there.append(seq)
    finally:
        shard.brokers.revive(leader)
    shard.brokers.wait_until_all_are_in_sync()
    assert len(there) > 1
    assert shard.consumed() == there
    replica = shard.settler()
    read_to_end(replica)
    assert filed(replica) == there


def test_which_brokers_are_ours(shard: Shard, brokers: Brokers) -> None:
    transactions = shard.engine.transactions(0, STAMP)
    addresses = brokers.addresses
    assert transactions.differs(",".join(addresses)) is None
    by_name = ",".join(one.replace("127.0.0.1", "localhost") for one in addresses)
    assert transactions.differs(by_name) is None
    url = ClusterUrl(addresses, "other")
    mock = KafkaEngine(ClientSettings(url, {"test.mock.num.brokers": "1"}))
    (stranger,) = mock._asker._consumer.list_topics(timeout=10).brokers.values()
    reason = transactions.differs(f"{stranger.host}:{stranger.port}")
    assert reason is not None and "cluster id" in reason
