"""The rules of rows: each that is broken is named, with the number of rows that break it."""

from collections.abc import Callable

import numpy as np
import pytest

from storage.check import check_directory
from storage.files import Files
from tests.unit.storage.samples import (
    HOUR,
    directory,
    dispatch_group,
    dispatch_log,
    message_group,
    message_log,
    schedule_group,
    schedule_log,
)
from tests.world.storage.files import SimulatedFiles


@pytest.fixture
def files() -> SimulatedFiles:
    files = SimulatedFiles()
    directory(files)
    return files


def reasons(files: Files) -> list[str]:
    return [found.reason for found in check_directory(files, None).findings]


def wrong(field: str, value: object, index: int = 0) -> Callable[[np.ndarray], None]:
    def change(rows: np.ndarray) -> None:
        rows[field][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wrong("seq", 4), "seqs have gaps or do not match the header"),
        (wrong("kind", 77), "unknown kinds of records"),
        (wrong("flags", 1), "flags that are not known"),
        (wrong("kind", 15), "a replay that is not marked as one, or has no target"),
        (wrong("flags", 11 << 4), "a priority that is none"),
        (wrong("due_ms", 0), "no due time"),
        (wrong("target_seq", 99), "a target that does not come before"),
        (wrong("kind", 2), "a target that does not come before"),
        (wrong("message_seq", 99), "a message that does not come before"),
        (wrong("payload_length", 3), "a payload lies outside of the frame"),
        (wrong("payload_offset", 4000), "a payload lies outside of the frame"),
        (wrong("payload_offset", 1), "a payload does not match its checksum"),
        (wrong("payload_crc", 1), "a payload is not the one that the row names"),
    ],
)
def test_records_that_cannot_be_true(change: Callable[[np.ndarray], None], reason: str) -> None:
    files = SimulatedFiles()
    directory(files)
    rows, payload = message_group(11, 3)
    change(rows)
    log = message_log(files)
    list(log.read(1))
    log.append(rows.tobytes(), payload, first_seq=11, last_seq=13, created_ms=1)
    log.close()
    assert f"{reason} (1 of 3 rows)" in reasons(files)
    assert not check_directory(files, None).is_clean


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wrong("seq", 8), "seqs do not ascend or do not match the header (3 of 3 rows)"),
        (wrong("seq", 10, 1), "seqs do not ascend or do not match the header (1 of 3 rows)"),
        (wrong("kind", 2), "unknown kinds of entries (1 of 3 rows)"),
        (wrong("kind", 1, 2), "unknown kinds of tombstones (1 of 3 rows)"),
        (wrong("flags", 11 << 4), "a priority that is none (1 of 3 rows)"),
        (wrong("flags", 5, 2), "a tombstone with flags of an entry (1 of 3 rows)"),
        (wrong("due_ms", 0), "a due time of another hour (1 of 3 rows)"),
        (wrong("message_seq", 99), "a message that does not come before (1 of 3 rows)"),
        (wrong("message_seq", 99, 2), "a tombstone of what does not come before (1 of 3 rows)"),
        (wrong("message_seq", 4, 2), "tombstones of rows that are not in the file (1 rows)"),
        (wrong("payload_length", 5, 2), "a tombstone with a payload (1 of 3 rows)"),
        (wrong("payload_crc", 1), "a payload is not the one that the row names (1 of 3 rows)"),
    ],
)
def test_schedule_rows_that_cannot_be_true(
    files: SimulatedFiles, change: Callable[[np.ndarray], None], reason: str
) -> None:
    rows, payload = schedule_group([10, 12], removed={14: 5})
    change(rows)
    log = schedule_log(files)
    log.append(
        HOUR,
        rows.tobytes(),
        payload,
        offset=log.size(HOUR),
        first_seq=10,
        last_seq=14,
        created_ms=1,
    )
    assert reason in reasons(files)
    assert not check_directory(files, None).is_clean


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wrong("seq", 9), "seqs do not match the header (2 of 2 rows)"),
        (wrong("message_seq", 99), "a message that does not come before (1 of 2 rows)"),
        (wrong("message_seq", 0), "a message that does not come before (1 of 2 rows)"),
        (wrong("due_ms", 1), "a due time of another hour (1 of 2 rows)"),
        (wrong("settled_ms", 0), "no time of settlement (1 of 2 rows)"),
        (wrong("subscription_id", 0), "no subscription (1 of 2 rows)"),
        (wrong("attempt", 0), "no attempt (1 of 2 rows)"),
        (wrong("outcome", 0), "unknown outcomes (1 of 2 rows)"),
        (wrong("flags", 128), "flags that are not known (1 of 2 rows)"),
    ],
)
def test_dispatch_rows_that_cannot_be_true(
    files: SimulatedFiles, change: Callable[[np.ndarray], None], reason: str
) -> None:
    rows = dispatch_group([2, 3])
    change(rows)
    log = dispatch_log(files)
    log.append(
        HOUR, rows.tobytes(), b"", offset=log.size(HOUR), first_seq=2, last_seq=3, created_ms=1
    )
    assert reasons(files) == [reason]
    assert not check_directory(files, None).is_clean
