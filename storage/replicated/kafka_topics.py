"""The settings that the topics of a cluster need, and the faults of those that there are.

    NAME.log        a partition for each shard    in order; a fold over it tells which records count
    NAME.settled    a partition for each shard    a set; the order does not matter
    NAME.meta       one partition                 the cluster, from its first record on

Nothing is deleted by age, by size or by compaction: the server says itself which records are not
needed any more. And no acknowledged record may be lost with one machine: a majority of the replicas
has it before it is acknowledged, and only a replica that has it becomes leader.

Cost: none. Threads: functions of values. The brokers are asked by `storage.replicated.kafka`.

Rejected: `flush.ms`, and a flush every so many records. Either leaves a window in which a power
loss of all brokers takes answered records. An operator who accepts that has it with `durability=os`
for nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from storage.replicated.kafka_settings import MESSAGE_MAX_BYTES, ClusterUrl

REPLICATION_DEFAULT: Final = 3
FLUSHES: Final = "flush.messages"


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The settings that a topic needs."""

    name: str
    partitions: int
    flushes: bool
    """Whether each replica brings every record to its disk before it acknowledges it."""

    def settings(self, replication: int) -> dict[str, str]:
        """The settings with which it is made on `replication` brokers."""
        settings = {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "min.insync.replicas": str(majority(replication)),
            "unclean.leader.election.enable": "false",
        }
        return settings | ({FLUSHES: "1"} if self.flushes else {})


@dataclass(frozen=True, slots=True)
class TopicFound:
    """The settings of a topic as it is."""

    replications: tuple[int, ...]
    """The number of replicas of each partition."""
    settings: Mapping[str, str]


def plans(url: ClusterUrl, shards: int, *, flushes: bool) -> tuple[TopicPlan, ...]:
    """The topics of a cluster."""
    return (
        TopicPlan(url.log_topic, shards, flushes),
        TopicPlan(url.settled_topic, shards, flushes),
        # A few records in all, and none of them less dear than a message.
        TopicPlan(url.meta_topic, 1, flushes),
    )


def majority(replication: int) -> int:
    """The majority of so many replicas: any two majorities have one in common."""
    return replication // 2 + 1


def differences(
    found: Mapping[str, TopicFound], wanted: Iterable[TopicPlan], replication: int | None
) -> list[str]:
    """The faults, a sentence for each; none: all is as it has to be.

    `replication`: how many brokers shall have each record; None: as many as there are now."""
    sentences = []
    for plan in wanted:
        topic = found.get(plan.name)
        if topic is None:
            sentences.append(f"The topic {plan.name} is missing.")
        else:
            sentences += _of_topic(plan, topic, replication)
    return sentences


def _of_topic(plan: TopicPlan, topic: TopicFound, replication: int | None) -> Iterable[str]:
    name = plan.name
    partitions = len(topic.replications)
    if partitions != plan.partitions:
        yield f"The topic {name} has {partitions} partitions, and {plan.partitions} are needed."
    least, most = min(topic.replications), max(topic.replications)
    if least != most:
        yield f"The partitions of {name} have from {least} to {most} replicas; give them as many."
    elif replication is not None and least != replication:
        yield f"The topic {name} has {least} replicas, and {replication} were asked for."

    quorum = majority(most)
    in_sync = _number(topic, "min.insync.replicas")
    if in_sync is None or not quorum <= in_sync <= most:
        yield _wrong(plan, topic, "min.insync.replicas", f"{quorum}, the majority of {most}")
    if _words(topic, "cleanup.policy") != {"delete"}:
        yield _wrong(plan, topic, "cleanup.policy", "delete: compaction takes records out")
    for setting in ("retention.ms", "retention.bytes"):
        if _number(topic, setting) != -1:
            yield _wrong(plan, topic, setting, "-1: the server says what may be deleted")
    if _words(topic, "unclean.leader.election.enable") != {"false"}:
        why = "false: a replica that lacks acknowledged records may not lead"
        yield _wrong(plan, topic, "unclean.leader.election.enable", why)
    largest = _number(topic, "max.message.bytes")
    if largest is None or largest < MESSAGE_MAX_BYTES:
        yield _wrong(plan, topic, "max.message.bytes", f"{MESSAGE_MAX_BYTES} or more")
    if plan.flushes and _number(topic, FLUSHES) != 1:
        yield _wrong(plan, topic, FLUSHES, "1, as the cluster's durability is fsync-all")


def _wrong(plan: TopicPlan, topic: TopicFound, setting: str, wanted: str) -> str:
    found = topic.settings.get(setting, "unknown")
    return f"{setting} of {plan.name} is {found}; it has to be {wanted}."


def _number(topic: TopicFound, setting: str) -> int | None:
    try:
        return int(topic.settings[setting])
    except (KeyError, ValueError):
        return None


def _words(topic: TopicFound, setting: str) -> set[str]:
    return {word.strip() for word in topic.settings.get(setting, "").split(",")}
