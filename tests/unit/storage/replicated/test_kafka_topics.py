"""What is wrong with topics, said in sentences. (On real brokers: tests/cluster.)"""

import pytest

from storage.replicated.kafka_settings import ClusterUrl
from storage.replicated.kafka_topics import (
    TopicFound,
    TopicPlan,
    differences,
    majority,
    plans,
)

URL = ClusterUrl.parse("kafka://b:9092/c")
PLAN = TopicPlan("c.log", 2, flushes=True)


def found(*replications: int, **changed: str) -> dict[str, TopicFound]:
    settings = PLAN.settings(3) | {"max.message.bytes": "1048588"}
    settings |= {name.replace("_", "."): value for name, value in changed.items()}
    return {"c.log": TopicFound(replications or (3, 3), settings)}


def test_majorities() -> None:
    assert [majority(count) for count in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("flushes", [False, True])
def test_the_topics_of_a_cluster(flushes: bool) -> None:
    wanted = plans(URL, 16, flushes=flushes)
    assert [(plan.name, plan.partitions) for plan in wanted] == [
        ("c.log", 16),
        ("c.settled", 16),
        ("c.meta", 1),
    ]
    assert all(("flush.messages" in plan.settings(3)) == flushes for plan in wanted)
    assert wanted[0].settings(3)["min.insync.replicas"] == "2"
    assert wanted[0].settings(1)["min.insync.replicas"] == "1"


def test_nothing_is_wrong() -> None:
    assert differences(found(), [PLAN], 3) == []
    assert differences(found(), [PLAN], None) == []
    # More copies before an answer are no harm to what is promised.
    assert differences(found(min_insync_replicas="3"), [PLAN], 3) == []


@pytest.mark.parametrize(
    ("topics", "sentence"),
    [
        ({}, "The topic c.log is missing."),
        (found(3), "The topic c.log has 1 partitions, and 2 are needed."),
        (found(3, 3, 3), "The topic c.log has 3 partitions, and 2 are needed."),
        (found(3, 2), "The partitions of c.log have from 2 to 3 replicas; give them as many."),
        (found(2, 2), "The topic c.log has 2 replicas, and 3 were asked for."),
        (
            found(min_insync_replicas="1"),
            "min.insync.replicas of c.log is 1; it has to be 2, the majority of 3.",
        ),
        (
            found(min_insync_replicas="4"),
            "min.insync.replicas of c.log is 4; it has to be 2, the majority of 3.",
        ),
        (
            found(cleanup_policy="compact,delete"),
            "cleanup.policy of c.log is compact,delete; it has to be delete: compaction takes "
            "records out.",
        ),
        (
            found(retention_ms="1000"),
            "retention.ms of c.log is 1000; it has to be -1: the server says what may be deleted.",
        ),
        (
            found(retention_bytes="soon"),
            "retention.bytes of c.log is soon; it has to be -1: the server says what may be "
            "deleted.",
        ),
        (
            found(unclean_leader_election_enable="true"),
            "unclean.leader.election.enable of c.log is true; it has to be false: a replica that "
            "lacks acknowledged records may not lead.",
        ),
        (
            found(max_message_bytes="999999"),
            "max.message.bytes of c.log is 999999; it has to be 1000000 or more.",
        ),
        (
            found(flush_messages="9223372036854775807"),
            "flush.messages of c.log is 9223372036854775807; it has to be 1, as the cluster's "
            "durability is fsync-all.",
        ),
    ],
)
def test_what_is_wrong(topics: dict[str, TopicFound], sentence: str) -> None:
    assert differences(topics, [PLAN], 3) == [sentence]


def test_a_setting_that_the_brokers_do_not_tell() -> None:
    topics = {"c.log": TopicFound((3, 3), {})}
    sentences = differences(topics, [PLAN], 3)
    assert len(sentences) == 7
    assert all(" of c.log is unknown; it has to be " in sentence for sentence in sentences)
