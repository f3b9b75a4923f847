"""The jobs over a directory in which messages had all that they may have: nothing is miscounted.

One directory, two hours of which everything is settled but for what lies further ahead: a group, a
time to live, URLs that messages name, messages with outcomes, runs of a schedule, a replay, records
of a topic."""

from collections import Counter

import pytest
from pyspark.sql import DataFrame, SparkSession

from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.schedules.records import Overlap
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule
from delayserver.parts.sources.records import SourceRecord
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.pipeline.audits.audit import audit_here
from delayserver.pipeline.audits.groups import GroupLine
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.forecast import forecast
from delayserver.records.direct import Destination
from delayserver.records.message import MessageOptions, OutcomeSubjects, Payload
from delayserver.records.subscriptions import KafkaTarget
from storage.rows import HOUR_MS
from tests.pipeline.store import FAILED, OK, START_MS, Store

MINUTE_MS = 60_000
TOLD = MessageOptions(outcomes=OutcomeSubjects("told", "told"))
TOPIC = KafkaTarget("127.0.0.1:9", "orders")


def to(host: str) -> MessageOptions:
    return MessageOptions(
        to=Destination(f"http://{host}/", "direct", max_attempts=2, backoff_ms=(1000,)),
        outcomes=TOLD.outcomes,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("options") / "data", retention_ms=10**12)
    mail = store.subscribe("mail", "order.*")
    store.subscribe("told", "told")
    store.subscribe("nobody", "code.*", type="pull")
    [plain] = store.publish("order.plain", [1000])
    store.publish("order.grouped", [2000, 2001, 2002], options=MessageOptions(group="g"))
    store.publish("code.sent", [3000, 3001], options=MessageOptions(ttl_ms=5000))
    store.publish("order.refused", [4000], options=TOLD)
    store.publish("direct", [5000], options=to("a.example"))
    store.publish("direct", [5001], options=to("b.example"))
    store.publish("direct", [HOUR_MS - MINUTE_MS], options=to("a.example"))
    store.publish("direct", [5 * HOUR_MS], options=to("b.example"))
    engine = store.server.engine
    engine.part(Scheduling).put(
        WantedSchedule(
            "s",
            "order.run",
            Payload(b"1"),
            "",
            10 * MINUTE_MS,
            "UTC",
            overlap=Overlap.SKIP,
            runs_max=3,
        ),
        START_MS,
    )
    known, *_ = engine.part(Sourcing).put(
        WantedSource("t", "order.taken", TOPIC, "due", "g"), START_MS
    )
    due = (b"2s", b"30m", b"never", b"6h")
    records = [
        SourceRecord(0, offset, b"k", b"1", (("due", one),)) for offset, one in enumerate(due)
    ]
    engine.part(Sourcing).take("t", known.state.version, records, START_MS)
    # The first of the group is tried again, and the others wait for it.
    answers = {"order.grouped": [FAILED, OK], "order.refused": [FAILED], "direct": [OK, FAILED]}

    def answer(subject: str) -> WebhookResponse:
        known = answers.get(subject, [OK])
        return known.pop(0) if len(known) > 1 else known[0]

    store.run(MINUTE_MS, answer)
    answers["direct"] = [OK]
    store.replay(plain, 1000, mail.id)
    store.run(40 * MINUTE_MS, answer)
    engine.part(Scheduling).trigger("s", store.clock.now_ms)
    store.run(2 * HOUR_MS, answer)
    store.checkpoint()
    store.kill()
    return store


def counted(frame: DataFrame, *columns: str) -> Counter[tuple[str, ...]]:
    counts = frame.groupBy(*columns).count().collect()
    return Counter({tuple(row[:-1]): row["count"] for row in counts})


def states_of(lines: list[GroupLine]) -> list[list[object]]:
    columns = ("name", "delivered", "retried", "dead", "pending")
    return sorted([line[column] for column in columns] for line in lines)


def test_the_audit_counts_each_message_once(store: Store) -> None:
    found = audit_here(store.root, now_ms=store.clock.now_ms)
    assert found.is_clean, (found.violations, found.damage)
    # 14 were published, of which two are still to come; 4 runs; 4 that tell what came of others.
    told = {name: count for name, count in found.messages.items() if count}
    assert told == {"accepted": 22, "delivered": 16, "dead": 4, "pending": 2}
    assert states_of(found.of("subject")) == [
        ["code.sent", 0, 0, 2, 0],
        ["direct", 2, 1, 1, 1],
        ["order.grouped", 3, 1, 0, 0],
        ["order.plain", 2, 0, 0, 0],  # once more, by a replay
        ["order.refused", 0, 1, 1, 0],
        ["order.run", 4, 0, 0, 0],
        ["order.taken", 2, 0, 0, 1],
        ["told", 4, 0, 0, 0],
    ]
    # Of what goes to no subscription there is one line, whatever the hosts.
    assert states_of(found.of("subscription")) == [
        ["_to", 2, 1, 1, 1],
        ["mail", 11, 2, 1, 0],
        ["nobody", 0, 0, 2, 0],
        ["told", 4, 0, 0, 0],
    ]


def test_the_states_and_the_log_name_who_had_it(spark: SparkSession, store: Store) -> None:
    states = spark.read.format("delaystate").option("now_ms", store.clock.now_ms).load(store.root)
    direct = counted(states.where("subject = 'direct'"), "subscription", "state")
    assert direct == {
        ("_to", "delivered"): 2,
        ("_to", "retried"): 1,
        ("_to", "dead"): 1,
        ("_to", "pending"): 1,
    }
    log = spark.read.format("delaylog").option("log", "dispatch").load(store.root)
    assert counted(log, "subscription") == {("mail",): 11, ("told",): 4, ("_to",): 2}


def test_what_is_archived_says_how_each_was_made_and_who_had_it(
    spark: SparkSession, store: Store
) -> None:
    history = spark.read.format("delayhistory").load(store.root)
    assert counted(history, "made_by") == {
        ("publish",): 16,
        ("retry",): 3,
        ("replay",): 1,
        ("run",): 4,
    }
    rows = history.where("subject in ('direct', 'order.run', 'told')").collect()
    keys = {row["key"].partition(":")[2] for row in rows if row["subject"] == "told"}
    assert keys == {"_to:delivered", "_to:dead", "mail:dead"}
    assert {one["subscription"] for row in rows for one in row["deliveries"]} == {
        "_to",
        "mail",
        "told",
    }
    assert {row["key"][:2] for row in rows if row["subject"] == "order.run"} == {"s@"}


def test_the_forecast_counts_what_is_still_to_come(spark: SparkSession, store: Store) -> None:
    found = forecast(Job(spark), store.root, now_ms=store.clock.now_ms)
    assert (found.waiting, found.overdue, found.damaged) == (2, 0, 0)
    due = dict(zip(found.subjects["subject"], found.subjects["due"], strict=True))
    assert due == {"order.taken": 1, "direct": 1}
