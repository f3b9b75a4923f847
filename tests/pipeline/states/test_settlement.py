"""What became of every message of an hour: against the simulation, and case by case."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, BrokenGuarantee, EntryState
from delayserver.pipeline.states.hour_files import read_hour
from delayserver.pipeline.states.settlement import (
    SLICE_ENTRIES,
    HourRows,
    Judgement,
    KnownSubscriptions,
    settle,
)
from delayserver.pipeline.states.snapshot import open_directory, take_snapshot
from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.records.horizon import Mark
from delayserver.records.subscriptions import SubjectSpan, Subscription
from storage.catalog import Catalog
from storage.directory import open_identity
from storage.files import Files
from storage.frame import Damage, Rows
from storage.rows import DISPATCH_DTYPE, HOUR_MS, SCHEDULE_DTYPE, Outcome, RecordKind
from tests.pipeline.store import HOUR, Store
from tests.world import World

DUE_MS = HOUR * HOUR_MS + 1000
NOTHING = np.empty(0, SCHEDULE_DTYPE)


def settle_all(files: Files, catalog: Catalog, now_ms: int) -> tuple[Rows, list[Damage]]:
    """What became of everything in a directory, as the source does it."""
    stamp = open_identity(files, random_bytes=None).stamp
    snapshot = take_snapshot(files, catalog, stamp=stamp)
    definitions = KnownSubscriptions(snapshot.subjects, snapshot.subscriptions)
    parts = [np.empty(0, SETTLED_DTYPE)]
    damage = list(snapshot.damage)
    for hour, state in snapshot.hours.items():
        rows, found = read_hour(
            files,
            hour,
            state,
            snapshot.unfiled.get(hour, NOTHING),
            stamp=stamp,
            checkpoint_seq=snapshot.checkpoint_seq,
        )
        damage += found
        judgement = Judgement(
            through_seq=snapshot.through_seq,
            retired_through_seq=snapshot.retired.get(hour, 0),
            now_ms=now_ms,
            definitions=definitions,
        )
        parts += settle(rows, judgement)
    return np.concatenate(parts), damage


def problems(rows: Rows) -> int:
    """All problems of some rows together."""
    return int(np.bitwise_or.reduce(rows["problems"], initial=0))


# ---- against the simulation ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_after_every_crash_of_a_correct_server_nothing_is_wrong(seed: int) -> None:
    with World(seed) as world:
        for _ in range(6):
            world.live(world.rng.randrange(20, 200))
            if not world.disk.exists("FORMAT"):
                continue
            settled, damage = settle_all(world.disk, world.catalog, world.clock.now_ms)
            assert damage == []
            # A clock that is set back between firing and recording makes a delivery look early.
            assert problems(settled) & ~BrokenGuarantee.EARLY == 0
            assert not (settled["state"] == EntryState.MISSING).any()


def test_the_ledger_knows_the_same_messages() -> None:
    with World(3) as world:
        for _ in range(10):
            world.live(150)
        settled, _ = settle_all(world.disk, world.catalog, world.clock.now_ms)
        seen = set(settled["message_seq"].tolist())
        assert seen
        assert seen <= world.ledger.messages.keys()
        cancelled = settled["message_seq"][settled["state"] == EntryState.CANCELLED].tolist()
        assert cancelled
        assert all(world.ledger.messages[seq].cancelled for seq in cancelled)


# ---- case by case ----------------------------------------------------------------------------


def subscription(number: int, **changes: object) -> Subscription:
    made = {"name": f"s{number}", "subject": "a", "type": "webhook", "created_ms": 0, **changes}
    return Subscription(id=number, **made)  # type: ignore[arg-type]


def schedule(*rows: tuple[int, int, int, int, int]) -> Rows:
    """seq, message_seq, subscription_id, kind, flags."""
    made = np.zeros(len(rows), SCHEDULE_DTYPE)
    for row, values in zip(made, rows, strict=True):
        for name, value in zip(
            ("seq", "message_seq", "subscription_id", "kind", "flags"), values, strict=True
        ):
            row[name] = value
    made["due_ms"], made["subject_id"] = DUE_MS, 1
    return made


def dispatch(*rows: tuple[int, int], outcome: int = Outcome.DELIVERED, late_ms: int = 5) -> Rows:
    """seq, subscription_id."""
    made = np.zeros(len(rows), DISPATCH_DTYPE)
    for row, (seq, subscription_id) in zip(made, rows, strict=True):
        row["seq"], row["subscription_id"] = seq, subscription_id
    made["message_seq"], made["due_ms"] = made["seq"], DUE_MS
    made["settled_ms"], made["attempt"], made["outcome"] = DUE_MS + late_ms, 1, outcome
    return made


def definitions_of(subscriptions: Sequence[Subscription]) -> KnownSubscriptions:
    return KnownSubscriptions({1: "a", 2: "b"}, {one.id: one for one in subscriptions})


def judgement_of(
    subscriptions: Sequence[Subscription], *, retired: bool, now_ms: int = DUE_MS + 1
) -> Judgement:
    return Judgement(
        through_seq=100,
        retired_through_seq=100 if retired else 0,
        now_ms=now_ms,
        definitions=definitions_of(subscriptions),
        settled_until_ms=now_ms + HOUR_MS,
    )


def judged(
    scheduled: Rows,
    dispatched: Rows,
    subscriptions: Sequence[Subscription] = (subscription(1),),
    *,
    retired: bool = True,
    now_ms: int = DUE_MS + 1,
) -> list[tuple[int, int, str, int]]:
    """seq, subscription_id, state, problems."""
    judgement = judgement_of(subscriptions, retired=retired, now_ms=now_ms)
    return [
        (
            int(row["seq"]),
            int(row["subscription_id"]),
            EntryState(row["state"]).name if row["state"] else "",
            int(row["problems"]),
        )
        for rows in settle(HourRows(scheduled, dispatched), judgement)
        for row in rows
    ]


ENTRY = (7, 7, 0, RecordKind.PUBLISH, 0)
CANCEL = (8, 7, 0, RecordKind.CANCEL, 1)
BOTH = (subscription(1), subscription(2))


def cases() -> Iterator[object]:
    delivered = (7, 1, "DELIVERED", 0)
    yield pytest.param([ENTRY], [(7, 1)], [delivered], id="delivered")
    yield pytest.param([ENTRY], [], [(7, 1, "MISSING", BrokenGuarantee.MISSING)], id="removed")
    repeated = (7, 1, "DELIVERED", BrokenGuarantee.REPEATED)
    yield pytest.param([ENTRY], [(7, 1), (7, 1)], [delivered, repeated], id="doubled")
    yield pytest.param([ENTRY, CANCEL], [], [(7, 0, "CANCELLED", 0)], id="cancelled")
    after = (7, 1, "DELIVERED", BrokenGuarantee.AFTER_REMOVAL)
    yield pytest.param(
        [ENTRY, CANCEL], [(7, 1)], [(7, 0, "CANCELLED", 0), after], id="cancelled and delivered"
    )
    retry = (8, 7, 1, RecordKind.RETRY, 1)
    yield pytest.param([ENTRY, retry], [], [(7, 1, "RETRIED", 0)], id="retried")
    yield pytest.param(
        [ENTRY, retry], [(7, 1)], [(7, 1, "RETRIED", 0), repeated], id="retried and delivered"
    )
    dead = (8, 7, 1, RecordKind.DEAD, 1)
    yield pytest.param([ENTRY, dead], [], [(7, 1, "DEAD", 0)], id="dead")
    yield pytest.param(
        [], [(9, 1)], [(9, 1, "DELIVERED", BrokenGuarantee.UNKNOWN)], id="delivery of nothing"
    )
    yield pytest.param([ENTRY], [(7, 1), (101, 1)], [delivered], id="behind the snapshot")


@pytest.mark.parametrize(("entries", "deliveries", "wanted"), list(cases()))
def test_one_subscription(
    entries: list[tuple[int, int, int, int, int]],
    deliveries: list[tuple[int, int]],
    wanted: list[tuple[int, int, str, int]],
) -> None:
    assert judged(schedule(*entries), dispatch(*deliveries)) == wanted


def test_each_of_two_subscriptions_settles_for_itself() -> None:
    found = judged(schedule(ENTRY), dispatch((7, 2)), BOTH)
    assert found == [(7, 2, "DELIVERED", 0), (7, 1, "MISSING", BrokenGuarantee.MISSING)]
    found = judged(schedule(ENTRY), dispatch((7, 2)), BOTH, retired=False)
    assert found == [(7, 2, "DELIVERED", 0), (7, 1, "PENDING", 0)]


def test_what_is_not_due_waits_for_nobody_in_particular() -> None:
    found = judged(schedule(ENTRY), dispatch(), BOTH, retired=False, now_ms=DUE_MS - 1)
    assert found == [(7, 0, "PENDING", 0)]


def test_a_subscription_that_came_later_is_not_waited_for() -> None:
    late = (subscription(1), subscription(2, created_ms=DUE_MS + 1))
    assert judged(schedule(ENTRY), dispatch((7, 1)), late) == [(7, 1, "DELIVERED", 0)]
    # With nobody else it is the first one that matches, whoever that was.
    assert judged(schedule(ENTRY), dispatch((7, 2)), late[1:]) == [(7, 2, "DELIVERED", 0)]
    assert judged(schedule(ENTRY), dispatch(), late[1:]) == [
        (7, 0, "MISSING", BrokenGuarantee.MISSING)
    ]


def test_nor_is_one_that_came_when_the_clock_was_set_back() -> None:
    fired, not_yet = Mark(7, DUE_MS + 1), Mark(6, DUE_MS + 1)
    late = (subscription(1), subscription(2, horizon=(fired,)))
    assert judged(schedule(ENTRY), dispatch((7, 1)), late) == [(7, 1, "DELIVERED", 0)]
    in_time = (subscription(1), subscription(2, created_ms=DUE_MS + 1, horizon=(not_yet,)))
    found = judged(schedule(ENTRY), dispatch((7, 1)), in_time)
    assert found == [(7, 1, "DELIVERED", 0), (7, 2, "MISSING", BrokenGuarantee.MISSING)]


def test_a_subscription_whose_subject_was_changed_later_is_not_waited_for() -> None:
    changed = (subscription(1), subscription(2, subject_since_ms=DUE_MS + 1))
    assert judged(schedule(ENTRY), dispatch((7, 1)), changed) == [(7, 1, "DELIVERED", 0)]


def changed_after(number: int, *subjects: str) -> Subscription:
    """One that has had these subjects, each but the first since ENTRY fell due."""
    spans = [SubjectSpan(subjects[0], 1, (Mark(1, DUE_MS - 10),))]
    for index, subject in enumerate(subjects[1:], 1):
        spans.append(SubjectSpan(subject, 9 + index, (Mark(8 + index, DUE_MS + index),)))
    return subscription(number, subject=subjects[-1], history=tuple(spans))


def test_an_entry_is_for_those_whose_subject_matched_when_it_fell_due() -> None:
    was, became = changed_after(2, "a", "b", "c"), changed_after(3, "b", "a")
    found = judged(schedule(ENTRY), dispatch((7, 1)), (subscription(1), was, became))
    assert found == [(7, 1, "DELIVERED", 0), (7, 2, "MISSING", BrokenGuarantee.MISSING)]
    assert judged(schedule(ENTRY), dispatch((7, 2)), (was, became)) == [(7, 2, "DELIVERED", 0)]
    had = np.concatenate([dispatch((7, 2)), dispatch((7, 3))])
    found = judged(schedule(ENTRY), had, (was, became))
    assert found == [(7, 2, "DELIVERED", 0), (7, 3, "DELIVERED", BrokenGuarantee.MISDIRECTED)]


def test_the_row_that_counts_an_entry_is_one_of_its_greatest_state() -> None:
    """A forecast counts what waits: also what one of two subscriptions has had."""
    subscriptions = (subscription(1), subscription(2))
    rows = HourRows(schedule(ENTRY, (9, 9, 0, RecordKind.PUBLISH, 0)), dispatch((7, 1)))
    judgement = judgement_of(subscriptions, retired=False)
    [settled] = settle(rows, judgement)
    counted = settled[settled["is_first"]]
    assert counted["seq"].tolist() == [7, 9]
    assert counted["state"].tolist() == [EntryState.PENDING] * 2


def test_nothing_more_is_expected_of_a_deleted_subscription() -> None:
    gone = (subscription(1, deleted=True),)
    assert judged(schedule(ENTRY), dispatch((7, 1)), gone) == [(7, 1, "DELIVERED", 0)]
    retry = (7, 5, 1, RecordKind.RETRY, 0)
    rows = dispatch((7, 0), outcome=Outcome.DROPPED)
    rows["message_seq"] = 5
    assert judged(schedule(retry), rows, gone) == [(7, 0, "DROPPED", 0)]


GONE = (subscription(2, deleted=True),)
DROPPED = Outcome.DROPPED


def test_what_deleted_subscriptions_left_of_a_message_waits_for_others() -> None:
    dropped = dispatch((7, 0), outcome=DROPPED)
    found = judged(schedule(ENTRY), dropped, GONE, retired=False)
    assert found == [(7, 0, "DROPPED", 0), (7, 0, "PENDING", 0)]
    # Once its hour is retired somebody must have had it.
    found = judged(schedule(ENTRY), dropped, GONE)
    assert found == [(7, 0, "DROPPED", BrokenGuarantee.WRONGLY_DROPPED)]
    changed = (*GONE, subscription(1, subject_since_ms=DUE_MS + 1))
    assert judged(schedule(ENTRY), dropped, changed) == [(7, 0, "DROPPED", 0)]
    for retired in (True, False):
        had = np.concatenate([dropped, dispatch((7, 1))])
        found = judged(schedule(ENTRY), had, (subscription(1), *GONE), retired=retired)
        assert found == [(7, 0, "DROPPED", 0), (7, 1, "DELIVERED", 0)]


# ---- what rows say of themselves is doubted ---------------------------------------------------


def the_problem(found: Sequence[tuple[int, int, str, int]]) -> str:
    """The problems of all rows, by their names."""
    problems = int(np.bitwise_or.reduce([row[3] for row in found]))
    return " ".join(one.name.lower() for one in BrokenGuarantee if one.name and one & problems)


def test_who_was_deleted_drops_and_nobody_else() -> None:
    """The first row of what an outside test found: delivered became dropped."""
    one = dispatch((7, 1), outcome=DROPPED)
    assert the_problem(judged(schedule(ENTRY), one)) == "wrongly_dropped"
    by_nobody = dispatch((7, 0), outcome=DROPPED)
    assert the_problem(judged(schedule(ENTRY), by_nobody)) == "missing wrongly_dropped"
    other = (subscription(1), subscription(2, subject="b", deleted=True))
    assert the_problem(judged(schedule(ENTRY), by_nobody, other)) == "missing wrongly_dropped"
    retry = (7, 5, 1, RecordKind.RETRY, 0)
    by_nobody["message_seq"] = 5
    assert the_problem(judged(schedule(retry), by_nobody)) == "missing wrongly_dropped"


@pytest.mark.parametrize("retired", [True, False])
def test_nobody_who_is_named_has_dropped(retired: bool) -> None:
    """The same in an hour that something unmatched keeps open, or where others had it."""
    rows = np.concatenate([dispatch((7, 1)), dispatch((7, 2), outcome=DROPPED)])
    found = judged(schedule(ENTRY), rows, BOTH, retired=retired)
    assert found == [
        (7, 1, "DELIVERED", 0),
        (7, 2, "DROPPED", BrokenGuarantee.WRONGLY_DROPPED),
    ]


@pytest.mark.parametrize("retired", [True, False])
def test_an_outcome_that_no_server_writes_settles_nothing(retired: bool) -> None:
    found = judged(schedule(ENTRY), dispatch((7, 1), outcome=9), retired=retired)
    waits = (7, 1, "MISSING", BrokenGuarantee.MISSING) if retired else (7, 1, "PENDING", 0)
    assert found == [(7, 1, "", BrokenGuarantee.UNKNOWN_OUTCOME), waits]
    both = np.concatenate([dispatch((7, 1)), dispatch((7, 2), outcome=9)])
    assert the_problem(judged(schedule(ENTRY), both, retired=retired)) == "unknown_outcome"
    tombstone = (8, 7, 0, RecordKind.SUBJECT, 1)
    found = judged(schedule(ENTRY, tombstone), dispatch((7, 1)))
    assert the_problem(found) == "unknown_outcome"


def test_a_subscription_that_never_was_is_named() -> None:
    both = dispatch((7, 1), (7, 77))
    assert the_problem(judged(schedule(ENTRY), both)) == "unknown_subscription"
    dead = (8, 7, 77, RecordKind.DEAD, 1)
    found = judged(schedule(ENTRY, dead), dispatch((7, 1)))
    assert the_problem(found) == "unknown_subscription"
    entry = (7, 5, 77, RecordKind.RETRY, 0)
    rows = dispatch((7, 1))
    rows["message_seq"] = 5
    assert the_problem(judged(schedule(entry), rows)) == "unknown_subscription"


@pytest.mark.parametrize(("name", "wrong"), [("message_seq", 6), ("due_ms", DUE_MS - 1)])
def test_a_delivery_that_names_another_message_is_mismatched(name: str, wrong: int) -> None:
    rows = dispatch((7, 1))
    rows[name] = wrong
    assert the_problem(judged(schedule(ENTRY), rows)) == "mismatched"


@pytest.mark.parametrize("settled_ms", [0, -5, DUE_MS + HOUR_MS + 2])
def test_what_was_settled_when_it_cannot_have_been_is_named(settled_ms: int) -> None:
    rows = dispatch((7, 1))
    rows["settled_ms"] = settled_ms
    early = "early " if settled_ms <= 0 else ""
    assert the_problem(judged(schedule(ENTRY), rows)) == f"{early}in_the_future"


def test_a_tombstone_that_points_to_another_message_is_mismatched() -> None:
    other = (6, 6, 0, RecordKind.PUBLISH, 0)
    for name, wrong in (("due_ms", DUE_MS + 60_000), ("subject_id", 2)):
        rows = schedule(other, ENTRY, CANCEL)
        rows[name][2] = wrong
        found = judged(rows, dispatch(), retired=False, now_ms=DUE_MS - 1)
        assert the_problem(found) == "mismatched"
    # It cannot have removed what came after it.
    rows = schedule(ENTRY, (9, 9, 0, RecordKind.PUBLISH, 0), (8, 9, 0, RecordKind.CANCEL, 1))
    assert the_problem(judged(rows, dispatch((7, 1)), retired=False)) == "mismatched"


def test_an_entry_that_is_not_what_it_says_is_mismatched() -> None:
    for odd in ((7, 6, 0, RecordKind.PUBLISH, 0), (7, 7, 0, RecordKind.MOVE, 0)):
        found = judged(schedule(odd), dispatch(), retired=False, now_ms=DUE_MS - 1)
        assert the_problem(found) == "mismatched"


TO = DIRECT_FIRST_ID + 3
OTHER = subscription(2, subject="b")
LATE = subscription(2, created_ms=DUE_MS + 1)
RETRY = (7, 5, 1, RecordKind.RETRY, 0)


@pytest.mark.parametrize(
    ("entry", "receiver", "subscriptions", "wanted"),
    [
        pytest.param(ENTRY, 2, [OTHER], "misdirected", id="of another subject"),
        pytest.param(ENTRY, 2, [subscription(2, subject="b", deleted=True)], "misdirected"),
        pytest.param(ENTRY, 2, [subscription(2, subject="b", subject_since_ms=9)], ""),
        pytest.param(ENTRY, 2, [subscription(2, deleted=True)], "", id="of one that was deleted"),
        pytest.param(ENTRY, 2, [subscription(1), LATE], "missing misdirected", id="came later"),
        pytest.param(ENTRY, 2, [LATE], "", id="nobody else was there"),
        pytest.param(
            ENTRY, 2, [subscription(1, subject_since_ms=9), LATE], "missing", id="maybe nobody"
        ),
        pytest.param(ENTRY, TO, [subscription(1)], "missing misdirected", id="by itself"),
        pytest.param(RETRY, 2, BOTH, "missing misdirected", id="of another one's retry"),
        pytest.param(RETRY, 2, [subscription(1, deleted=True), BOTH[1]], "", id="an heir"),
        pytest.param((7, 7, TO, RecordKind.PUBLISH, 0), TO, BOTH, "", id="where it says"),
        pytest.param((7, 7, TO, RecordKind.PUBLISH, 0), 1, BOTH, "missing misdirected"),
    ],
)
def test_who_had_a_message_must_be_who_it_was_for(
    entry: tuple[int, int, int, int, int],
    receiver: int,
    subscriptions: Sequence[Subscription],
    wanted: str,
) -> None:
    rows = dispatch((7, receiver))
    rows["message_seq"] = entry[1]
    assert the_problem(judged(schedule(entry), rows, subscriptions)) == wanted


def test_a_delivery_before_its_time_is_early() -> None:
    found = judged(schedule(ENTRY), dispatch((7, 1), late_ms=-1))
    assert found == [(7, 1, "DELIVERED", BrokenGuarantee.EARLY)]


def test_an_hour_longer_than_a_slice() -> None:
    count = 2 * SLICE_ENTRIES + 3
    entries = np.repeat(schedule(ENTRY), count)
    entries["seq"] = entries["message_seq"] = np.arange(1, count + 1)
    rows = np.repeat(dispatch((7, 1)), count)
    rows["seq"] = entries["seq"][::-1]
    rows = rows[rows["seq"] != SLICE_ENTRIES]
    judgement = Judgement(count, count, DUE_MS, definitions_of([subscription(1)]))
    slices = list(settle(HourRows(entries, rows), judgement))
    assert [len(one) for one in slices] == [SLICE_ENTRIES, SLICE_ENTRIES, 3]
    settled = np.concatenate(slices)
    assert settled["seq"].tolist() == entries["seq"].tolist()
    assert settled["seq"][settled["state"] == EntryState.MISSING].tolist() == [SLICE_ENTRIES]


def test_messages_with_a_history_are_marked_and_entries_are_counted_once() -> None:
    retry = (8, 7, 1, RecordKind.RETRY, 1)
    again = (8, 7, 1, RecordKind.RETRY, 0)
    plain = (9, 9, 0, RecordKind.PUBLISH, 0)
    rows = HourRows(schedule(ENTRY, again, retry, plain), dispatch((7, 2), (8, 1), (9, 1), (9, 2)))
    judgement = Judgement(9, 9, DUE_MS, definitions_of(BOTH))
    (settled,) = settle(rows, judgement)
    by_seq = {seq: settled[settled["seq"] == seq] for seq in (7, 8, 9)}
    assert by_seq[7]["has_history"].all() and by_seq[8]["has_history"].all()
    assert not by_seq[9]["has_history"].any()
    assert [int(rows["is_first"].sum()) for rows in by_seq.values()] == [1, 1, 1]
    assert set(by_seq[7]["entry_state"].tolist()) == {EntryState.RETRIED}
    assert by_seq[7]["successor_seq"][by_seq[7]["state"] == EntryState.RETRIED].tolist() == [8]


def test_a_subject_that_a_subscription_got_later_is_not_missing_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.subscribe("first", "a")
    other = store.subscribe("other", "b")
    store.publish("a", [1000])
    store.run(2000)
    changed = store.change(other, subject="*")
    assert [span.subject for span in changed.history] == ["b", "*"]
    store.publish("a", [3000])
    store.run(2 * HOUR_MS)
    store.checkpoint()
    store.stop()
    directory = open_directory(store.root)
    with directory.catalog() as catalog:
        settled, damage = settle_all(directory.files, catalog, store.clock.now_ms)
    assert damage == []
    assert problems(settled) == 0
    assert settled["state"].tolist() == [EntryState.DELIVERED] * 3
