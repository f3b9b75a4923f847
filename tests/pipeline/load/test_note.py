"""The note of a load: its lock, what a crash makes of it, and the marks of tables."""

import multiprocessing
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.errors import PipelineError
from delayserver.pipeline.load.note import LoadNote, NoteFile, abandoned, mark_of
from tests.waiting import wait_until

NOTE = LoadNote(
    columns={"due": "due", "key": None},
    now_ms=1,
    delay_max_ms=2,
    body_max_bytes=3,
    read=5,
    staged=4,
    past=0,
    rejected={"no due time": 1},
    mark=(1 << 64) - 1,
    has_ids=False,
    parts={0: (("a.0.part", 4),)},
)


def test_what_is_noted_is_read_by_the_next_load(tmp_path: Path) -> None:
    with NoteFile(tmp_path, "a") as file:
        assert file.read() is None
        file.write(NOTE)
    with NoteFile(tmp_path, "a") as file:
        assert file.read() == NOTE
        file.clear()
        assert file.read() is None
    assert not list(tmp_path.iterdir()), "what says nothing does not stay"


def test_a_note_that_was_cut_off_or_has_rotted_says_nothing(tmp_path: Path) -> None:
    with NoteFile(tmp_path, "a") as file:
        file.write(NOTE)
    path = tmp_path / "a.load"
    whole = path.read_bytes()
    cut = [whole[:length] for length in range(len(whole))]
    flipped = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)
    ]
    for data in cut + flipped:
        path.write_bytes(data)
        with NoteFile(tmp_path, "a") as file:
            assert file.read() is None
            file.write(NOTE)


def test_one_load_at_a_time_has_a_name(tmp_path: Path) -> None:
    with NoteFile(tmp_path, "a"), NoteFile(tmp_path, "b"):
        with pytest.raises(PipelineError, match="another load runs under the name a: wait"):
            NoteFile(tmp_path, "a")
        assert not list(abandoned(tmp_path)), "none of those that run"
    with NoteFile(tmp_path, "a"):
        pass


def hold(directory: Path) -> None:
    """A load that stages, until it is killed."""
    with NoteFile(directory, "killed"):
        (directory / "killed.0.part").touch()
        threading.Event().wait()


def test_a_load_that_was_killed_is_abandoned(tmp_path: Path) -> None:
    with NoteFile(tmp_path, "done") as file:
        file.write(NOTE)
    load = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path,))
    load.start()
    wait_until((tmp_path / "killed.0.part").exists)
    assert not list(abandoned(tmp_path))
    load.kill()
    load.join()
    found = []
    for import_id, note in abandoned(tmp_path):
        with note:
            found.append(import_id)
    assert found == ["killed"]
    assert not list(abandoned(tmp_path))
    assert (tmp_path / "done.load").exists()


rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-5, 5), st.integers(0, 9), st.integers(0, 9)),
    max_size=8,
)


def mark(of: list[tuple[int, int, int, int]]) -> int:
    columns = np.array(of, np.int64).reshape(-1, 4).T
    subjects, due_ms, lengths, crcs = columns
    return mark_of(
        subjects.astype(np.uint64), due_ms, lengths.astype(np.uint32), crcs.astype(np.uint32)
    )


@given(rows, rows, st.randoms())
def test_a_mark_is_that_of_the_rows_in_any_order(
    ones: list[tuple[int, int, int, int]],
    others: list[tuple[int, int, int, int]],
    random: Random,
) -> None:
    mixed = [*ones, *others]
    random.shuffle(mixed)
    assert mark(mixed) == (mark(ones) + mark(others)) % (1 << 64)
    assert (mark(ones) == mark(others)) == (sorted(ones) == sorted(others))
