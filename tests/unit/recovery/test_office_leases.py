"""The leases of an owner: its office hands them on, and only if it is given away in order."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.records.kept_leases import LEASE_DTYPE, PULL_DTYPE, KeptLeases
from delayserver.recovery import office_leases
from delayserver.recovery.office_leases import OfficeLeases
from storage.directory import Identity
from storage.replicated.holder import Holder
from tests.unit.storage.replicated.test_holder import InOffice

IDENTITY = Identity(7, 0, bytes(16))


def place(holder: Holder, *seized_ms: int, identity: Identity = IDENTITY) -> OfficeLeases:
    return OfficeLeases(holder, seized_ms, identity)


def kept(count: int) -> KeptLeases:
    pulls, leases = np.zeros(1, PULL_DTYPE), np.zeros(count, LEASE_DTYPE)
    pulls["count"] = count
    leases["seq"] = np.arange(count)
    return KeptLeases(True, np.array([1, 2, 3]), pulls, leases)


def test_what_is_kept_is_read_by_the_next_owner() -> None:
    holder = InOffice().holder
    place(holder).keep(kept(5))
    found = place(holder, 8, 9).read()
    assert found.is_clean
    assert found.leases["seq"].tolist() == [0, 1, 2, 3, 4]
    assert found.starts_ms.tolist() == [8, 9], "the log has said when owners were killed"


def test_an_owner_that_was_left_nothing_holds_nothing() -> None:
    found = place(InOffice().holder, 8).read()
    assert found.is_clean and not len(found.leases)
    assert found.begun(9, is_first=False).starts_ms.tolist() == [8]


def test_an_owner_that_hands_out_leaves_nothing_until_it_keeps_its_leases() -> None:
    holder = InOffice().holder
    holder.leases = b"what it was left"
    place(holder).begin(KeptLeases())
    assert holder.leases is None


@pytest.mark.parametrize("data", [None, b"of a newer version"])
def test_leases_that_cannot_be_read_count_as_those_of_a_kill(data: bytes | None) -> None:
    holder = InOffice().holder
    holder.leases = data
    found = place(holder, 8).read()
    assert not found.is_clean and not len(found.leases)
    assert found.begun(9, is_first=False).starts_ms.tolist() == [8, 9]


def test_leases_of_another_shard_are_none() -> None:
    holder = InOffice().holder
    place(holder, identity=Identity(8, 0, bytes(16))).keep(kept(1))
    assert not place(holder).read().is_clean


def test_more_leases_than_a_hand_over_takes_end_with_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = InOffice().holder
    place(holder).begin(KeptLeases())
    monkeypatch.setattr(office_leases, "LEASES_MAX_BYTES", 100)
    place(holder).keep(kept(3))
    assert holder.leases is None
