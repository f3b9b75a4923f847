"""What came behind the directories is read as it was meant, and written the same."""

from collections.abc import Iterator

import msgspec
import pytest

from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.schedules.records import Schedule, ScheduleChange, ScheduleState
from delayserver.parts.sources.records import Source, SourceChange, SourceState, UnpublishedRecord
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.definitions import TABLE_NUMBERS
from delayserver.records.direct import Destination
from delayserver.records.message import (
    MessageOptions,
    Origin,
    OutcomeSubjects,
    Payload,
    ScheduledRun,
    Watch,
)
from delayserver.records.subscriptions import (
    AmqpTarget,
    KafkaTarget,
    NatsTarget,
    RedisTarget,
    Subscription,
)
from delayserver.schedule.expansion import ImportRecord
from storage.catalog import Table
from storage.notes import Note
from storage.rows import SCHEDULES, RecordKind
from tests.golden.make import DEFINITIONS, GROUPS
from tests.golden.records import DEFINED, NOTES, RECORDS, filed_rows, golden, values

VALUES = values()
WRITTEN = [
    *(Payload, Origin, Watch, History, DeliveryAttempt, MessageOptions, Destination),
    *(OutcomeSubjects, ScheduledRun, Schedule, ScheduleState, ScheduleChange, Source),
    *(SourceState, SourceChange, UnpublishedRecord, Heartbeat, ImportRecord, Note),
    *(Subscription, KafkaTarget, RedisTarget, NatsTarget, AmqpTarget),
]


@pytest.mark.parametrize("name", VALUES)
def test_it_is_written_as_it_was(name: str) -> None:
    assert golden().get(name, b"").hex() == VALUES[name].written.hex()


@pytest.mark.parametrize("name", VALUES)
def test_it_is_read_as_it_was_meant(name: str) -> None:
    assert VALUES[name].read(golden()[name]) == VALUES[name].value


def test_nothing_stands_there_that_nobody_reads() -> None:
    assert golden().keys() == VALUES.keys()


def test_every_kind_of_record_has_its_bytes() -> None:
    """Here, or in the directories."""
    kinds = {row[-1] for group in GROUPS for row in group}
    assert kinds | {row[-1] for row, _ in RECORDS} == set(RecordKind)
    assert set(SCHEDULES) - kinds <= set(filed_rows()[0]["kind"].tolist())


def test_every_table_of_the_definitions_log_has_its_bytes() -> None:
    numbers = {one.table for changes in DEFINITIONS.values() for one in changes}
    of_core = {number for table, number in TABLE_NUMBERS.items() if table in set(Table)}
    assert numbers | {TABLE_NUMBERS[table] for table in DEFINED} == of_core
    assert numbers.isdisjoint(TABLE_NUMBERS[table] for table in DEFINED)


@pytest.mark.parametrize("written", WRITTEN)
def test_every_field_has_its_bytes(written: type[msgspec.Struct]) -> None:
    """A field that somebody adds is given a value here, too."""
    meant = [*(value.value for value in VALUES.values()), *NOTES]
    found = [one for one in structs_in(meant) if type(one) is written]
    for field in msgspec.structs.fields(written):
        given = [getattr(one, field.name) for one in found]
        assert any(value and value != field.default for value in given), field.name


def structs_in(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        yield from structs_in(msgspec.structs.astuple(value))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from structs_in(one)
