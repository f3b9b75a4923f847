"""What takes the place of definitions that are lost."""

import numpy as np

from delayserver.records.message import Payload, ScheduledRun, encode_payload
from delayserver.records.schedules import ScheduleState, unpack_state
from delayserver.records.subscriptions import decode_subscription
from delayserver.records.tables import dead_letter_key, number_key
from delayserver.recovery.repair_catalog import Rebuilt, name_what_is_lost
from storage.catalog import Table
from storage.rows import SCHEDULE_DTYPE, RecordKind


def test_a_schedule_is_where_its_newest_run_has_brought_it_and_half_of_one_is_lost() -> None:
    states = [ScheduleState(seq, 1, 0, 100 + seq) for seq in range(9)]
    rebuilt = Rebuilt()
    take = rebuilt.hour()
    for seq, name in ((5, "s"), (3, "s"), (6, "newer"), (7, "gone"), (8, "half")):
        run = ScheduledRun(name, states[seq].pack())
        sealed = encode_payload(Payload(b"1", run=run))
        rows = np.zeros(1, SCHEDULE_DTYPE)
        rows["seq"] = rows["message_seq"] = seq
        rows["kind"], rows["payload_length"] = RecordKind.RUN, len(sealed)
        take(rows, sealed)
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    schedules, known = defined[Table.SCHEDULES], defined[Table.SCHEDULE_STATES]
    schedules.update({b"s": b"1", b"newer": b"2", b"half": b"3", b"stateless": b"4"})
    known.update({b"s": states[4].pack(), b"newer": states[8].pack(), b"nameless": b"5"})
    losses = rebuilt.mend_schedules(defined)
    assert {key: unpack_state(value).seq for key, value in known.items()} == {
        b"s": 5,
        b"newer": 8,
        b"half": 8,
    }
    assert schedules.keys() == known.keys()
    assert losses == [
        "the schedule 'nameless': put it again",
        "the schedule 'stateless': put it again",
    ]


def test_the_dead_letters_of_a_lost_subscription_can_be_asked_for() -> None:
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    defined[Table.DEAD_LETTERS] = {dead_letter_key(3, 9): b"a letter"}
    lost, losses = name_what_is_lost(defined, Rebuilt(), is_damaged=False)
    assert [*lost[Table.SUBSCRIPTIONS]] == [number_key(3)]
    definition = decode_subscription(lost[Table.SUBSCRIPTIONS][number_key(3)])
    assert (definition.name, definition.deleted) == ("lost-subscription-3", True)
    assert [definition.name in loss for loss in losses] == [True]
