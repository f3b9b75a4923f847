"""The overlays of the sequencer against a dictionary that is copied before every change."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.decisions.group import Group
from delayserver.decisions.packing import Publishes
from delayserver.decisions.sequencer import Sequencer
from delayserver.records.tables import (
    Change,
    ChangeState,
    KeyEntry,
    change_key,
    pack_change,
    pack_key_entry,
    pack_key_values,
)
from storage.catalog import Table
from storage.rows import RecordKind
from tests.world.storage.catalog import MemoryCatalog

KEYS = 4
MESSAGES = 3
SUBSCRIPTIONS = 2


@dataclass
class PutKey:
    key: int


@dataclass
class PutKeys:
    """Many at once."""

    keys: set[int]


@dataclass
class PutChange:
    message: int
    subscription: int
    removes: bool


@dataclass
class NewSubject:
    number: int


class Close:
    """The open group goes to the committer, if that is free."""


class Commit:
    """The group that is being written is durable."""


class Fail:
    """The group that is being written does not fit on the disk."""


class Checkpoint:
    """Everything that is durable is filed, in the catalog, and forgotten."""


Step = PutKey | PutKeys | PutChange | NewSubject | Close | Commit | Fail | Checkpoint
State = tuple[dict[int, KeyEntry], dict[tuple[int, int], Change], dict[int, int], list[str]]


class Runner:
    """A sequencer, and what it must answer: the state after each seq."""

    def __init__(self) -> None:
        self.catalog = MemoryCatalog()
        self.sequencer = Sequencer(self.catalog, next_seq=1, subjects={})
        self.keys: dict[int, KeyEntry] = {}
        self.changes: dict[tuple[int, int], Change] = {}
        self.removed: dict[int, int] = {}  # target seq → the record that removes it
        self.subjects: list[str] = []
        self.before: deque[tuple[Group, State]] = deque()  # the groups that are not durable
        self.durable: State = self.state()
        self.durable_seq = self.checkpoint_seq = 0
        self.open()

    def state(self) -> State:
        return dict(self.keys), dict(self.changes), dict(self.removed), list(self.subjects)

    def open(self) -> None:
        self.before.append((self.sequencer.group, self.state()))

    def apply(self, step: Step) -> None:
        match step:
            case PutKey(key=key):
                seq = self.sequencer.append(RecordKind.PUBLISH, key_hash=self.hash(key))
                entry = KeyEntry(seq, 7, seq)
                self.sequencer.put_key(seq, self.hash(key), entry)
                self.keys[key] = entry
            case PutKeys(keys=keys):
                hashes = [self.hash(key) for key in keys]
                first_seq = self.sequencer.append_publishes(
                    Publishes([7] * len(keys), [1] * len(keys), [b""] * len(keys), [0] * len(keys))
                )
                entries = [KeyEntry(first_seq + n, 7, 0) for n in range(len(keys))]
                taken = any(key in self.keys for key in keys)
                assert self.sequencer.has_any_key(hashes) == taken
                seqs = range(first_seq, first_seq + len(keys))
                values = pack_key_values(seqs, [7] * len(keys), [0] * len(keys))
                pairs = dict(zip(hashes, values, strict=True))
                self.sequencer.put_keys(first_seq + len(keys) - 1, pairs)
                self.keys.update(zip(keys, entries, strict=True))
            case PutChange(message=message, subscription=subscription, removes=removes):
                target_seq = 1_000 + message
                kind = RecordKind.CANCEL if removes else RecordKind.RETRY
                seq = self.sequencer.append(kind, target_seq=target_seq)
                change = Change(ChangeState.CANCELLED, seq, 7, 0, 0)
                self.sequencer.put_change(seq, message, subscription, change)
                self.changes[message, subscription] = change
                if removes:
                    self.removed[target_seq] = seq
            case NewSubject(number=number):
                name = f"subject {number}"
                if name not in self.subjects:
                    self.subjects.append(name)
                assert self.sequencer.subject_id(name) == self.subjects.index(name) + 1
            case Close():
                if len(self.before) == 1 and self.sequencer.group.count:
                    self.sequencer.close_group(0)
                    self.open()
            case Commit():
                if len(self.before) == 2:
                    group, _ = self.before.popleft()
                    self.durable_seq = group.last_seq
                    self.durable = self.before[0][1]
                    group.tell_waiters(None)
            case Fail():
                if len(self.before) == 2:
                    groups = [group for group, _ in self.before]
                    # Copies: what was durable must not change with what comes now.
                    was_keys, was_changes, was_removed, was_subjects = self.before[0][1]
                    self.keys, self.changes = dict(was_keys), dict(was_changes)
                    self.removed, self.subjects = dict(was_removed), list(was_subjects)
                    self.sequencer.roll_back(groups)
                    self.before.clear()
                    self.open()
                    assert self.sequencer.next_seq == groups[0].first_seq
            case Checkpoint():
                durable_keys, durable_changes, _, _ = self.durable
                self.catalog.commit(
                    {
                        Table.KEYS: [
                            (self.hash(key), pack_key_entry(entry.seq, entry.due_ms, entry.digest))
                            for key, entry in durable_keys.items()
                        ],
                        Table.CHANGES: [
                            (change_key(*where), pack_change(change))
                            for where, change in durable_changes.items()
                        ],
                    }
                )
                self.checkpoint_seq = self.durable_seq
                self.sequencer.prune(self.checkpoint_seq)

    @staticmethod
    def hash(key: int) -> bytes:
        return bytes([key + 1] * 16)

    def check(self) -> None:
        for key in range(KEYS):
            assert self.sequencer.key(self.hash(key)) == self.keys.get(key)
        for message in range(MESSAGES):
            assert self.sequencer.changes(message) == {
                subscription: self.changes[message, subscription]
                for subscription in range(SUBSCRIPTIONS)
                if (message, subscription) in self.changes
            }
        for target_seq, record_seq in self.removed.items():
            if record_seq > self.checkpoint_seq:
                assert self.sequencer.removed.get(target_seq) is not None
        assert set(self.sequencer.removed) <= set(self.removed)
        assert list(self.sequencer.subjects) == self.subjects
        assert list(self.sequencer.subject_names.values()) == self.subjects
        group, _ = self.before[-1]
        assert group is self.sequencer.group
        assert group.last_seq + 1 == self.sequencer.next_seq


steps = st.lists(
    st.one_of(
        st.builds(PutKey, st.integers(0, KEYS - 1)),
        st.builds(PutKeys, st.sets(st.integers(0, KEYS - 1), min_size=1)),
        st.builds(
            PutChange,
            st.integers(0, MESSAGES - 1),
            st.integers(0, SUBSCRIPTIONS - 1),
            st.booleans(),
        ),
        st.builds(NewSubject, st.integers(0, 3)),
        st.builds(Close),
        st.builds(Commit),
        st.builds(Fail),
        st.builds(Checkpoint),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(steps)
def test_overlay_and_catalog_are_one_dictionary_that_can_be_rolled_back(
    steps: list[Step],
) -> None:
    runner = Runner()
    for step in steps:
        runner.apply(step)
        runner.check()
