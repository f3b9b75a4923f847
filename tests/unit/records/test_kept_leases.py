"""The record of the leases: read as it was written, and never taken for another one."""

import numpy as np
import pytest

from delayserver.records.kept_leases import (
    ATTEMPT_DTYPE,
    LEASE_DTYPE,
    PULL_DTYPE,
    STARTS_MAX,
    KeptLeases,
    decode_kept_leases,
    encode_kept_leases,
)
from storage.errors import DamageError

STAMP = 0x01020304
KEPT = KeptLeases(
    True,
    np.array([1_700_000_000_000, 1_700_000_000_001], np.int64),
    np.array([(31, 1_700_000_000_002, 0xBEBE260C, 7, 2), (32, 0, 1, 8, 1)], PULL_DTYPE),
    np.array(
        [
            (9, 1_700_000_000_000, 500, 0, 1),
            (10, 1_700_000_000_000, 1, 4, 2),
            (11, 1_700_000_000_000, 9, 0, 1),
        ],
        LEASE_DTYPE,
    ),
    np.array([(12, 7, 3)], ATTEMPT_DTYPE),
)
WRITTEN = (
    "444c4c317df9f2ec040302010100000002000000020000000300000001000000"
    "0068e5cf8b0100000168e5cf8b010000"
)
"""The header, and the starts."""


def test_it_is_read_as_it_was_written() -> None:
    data = encode_kept_leases(KEPT, STAMP)
    assert data[:48].hex() == WRITTEN
    read = decode_kept_leases(data, STAMP, "LEASES")
    assert read.is_clean
    for name in ("starts_ms", "pulls", "leases", "attempts"):
        assert getattr(read, name).tolist() == getattr(KEPT, name).tolist()


def test_it_says_whose_each_lease_is() -> None:
    leased = KEPT.leased()
    assert leased["seq"].tolist() == [9, 10, 11]
    assert leased["subscription_id"].tolist() == [7, 7, 8]


def test_every_byte_that_changes_is_noticed() -> None:
    data = encode_kept_leases(KEPT, STAMP)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(DamageError):
            decode_kept_leases(bytes(changed), STAMP, "LEASES")


@pytest.mark.parametrize("length", [0, 35, 36, 100])
def test_a_part_of_it_is_none(length: int) -> None:
    with pytest.raises(DamageError):
        decode_kept_leases(encode_kept_leases(KEPT, STAMP)[:length], STAMP, "LEASES")


def test_that_of_another_directory_is_none() -> None:
    with pytest.raises(DamageError, match="another directory"):
        decode_kept_leases(encode_kept_leases(KEPT, STAMP), STAMP + 1, "LEASES")


def test_a_start_behind_a_kill_is_remembered_and_a_planned_one_is_not() -> None:
    assert KEPT.begun(5, is_first=False).starts_ms.tolist() == KEPT.starts_ms.tolist()
    assert KeptLeases().begun(5, is_first=True).starts_ms.tolist() == []
    killed = KeptLeases(starts_ms=KEPT.starts_ms)
    assert killed.begun(1_800_000_000_000, is_first=False).starts_ms[-1] == 1_800_000_000_000
    assert len(killed.begun(5, is_first=False).leases) == 0


def test_the_oldest_start_is_forgotten_first() -> None:
    kept = KeptLeases()
    for now_ms in range(STARTS_MAX + 3):
        kept = kept.begun(now_ms, is_first=False)
    assert kept.starts_ms.tolist() == list(range(3, STARTS_MAX + 3))
