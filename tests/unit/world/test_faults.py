"""What faults add to the contract: calls that fail as planned, over fake files and real ones."""

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from storage.errors import DiskError, DiskFullError, SyncError, UnreadableError
from storage.files import Files, OsFiles
from tests.unit.storage.samples import content
from tests.unit.world.outcomes import (
    contents,
    durable_file,
    tree,
    trees,
)
from tests.world.storage.faults import (
    Fault,
    FaultKind,
    Faults,
    FaultyFiles,
    Moment,
    NumberedCall,
    SimulatedCrash,
)
from tests.world.storage.files import SimulatedFiles


@contextlib.contextmanager
def fails_as(error: type[DiskError], number: int) -> Iterator[None]:
    with pytest.raises(error, match=rf"fault at call {number}\)") as raised:
        yield
    assert type(raised.value) is error


def io_error(at: int, moment: Moment = Moment.BEFORE, *, for_good: bool = False) -> Fault:
    return Fault(at, FaultKind.IO_ERROR, moment, for_good)


def work(files: Files) -> None:
    """Makes every call of the seam once or more. 19 calls."""
    with files.lock("lock"):
        files.make_directory("d")
        assert not files.exists("d/a")
        file = files.open("d/a", create=True)
        file.pwrite([b"abc"], 0)
        file.fdatasync()
        file.pwrite_durable([b"def"], 3)
        assert file.size() == 6
        file.truncate(4)
        assert file.pread(9, 0) == b"abcd"
        file.close()
        files.sync_directory("d")
        assert files.list("d") == ["a"]
        assert files.free_bytes() > 0
        files.rename("d/a", "d/b")
        files.open("d/b").close()
        files.unlink("d/b")
        files.sync_directory("d")


WORK_CALLS = 19


def test_empty_faults_only_count_and_trace() -> None:
    faults = Faults(keep_trace=True)
    work(FaultyFiles(SimulatedFiles(), faults))
    assert faults.call_count == WORK_CALLS
    assert faults.trace[:5] == [
        NumberedCall(1, "lock", "lock", takes_space=True),
        NumberedCall(2, "make_directory", "d", takes_space=True),
        NumberedCall(3, "exists", "d/a"),
        NumberedCall(4, "open", "d/a", takes_space=True),
        NumberedCall(5, "pwrite", "d/a", takes_space=True),
    ]
    assert [call.number for call in faults.trace] == list(range(1, WORK_CALLS + 1))
    assert len({call.call for call in faults.trace}) == 16
    assert not faults.struck


def state_of(disk: SimulatedFiles) -> object:
    """What a reader sees, what a power loss leaves, and what stands between them."""
    inodes = {id(one): one for names in disk._names.values() for one in names.values()}
    data = [(bytes(one.content), bytes(one.durable), [*one.unsynced]) for one in inodes.values()]
    return data, disk.contents(), len(disk._unsynced_names)


def test_a_call_that_changes_nothing_leaves_the_disk_as_it_was() -> None:
    """Sweeps of crashes leave these calls out."""
    faults = Faults(keep_trace=True)
    work(FaultyFiles(SimulatedFiles(), faults))
    for call in faults.trace:
        states = []
        for moment in (Moment.BEFORE, Moment.AFTER):
            disk = SimulatedFiles()
            with contextlib.suppress(SimulatedCrash):
                work(FaultyFiles(disk, Faults(Fault(call.number, FaultKind.CRASH, moment))))
            states.append(state_of(disk))
        assert call.changes or states[0] == states[1], call
    reading = [call.call for call in faults.trace if not call.changes]
    assert {"exists", "list", "pread", "size", "close", "free_bytes"} <= {*reading}


@pytest.mark.parametrize("kind", [FaultKind.NO_SPACE, FaultKind.NO_DESCRIPTOR])
def test_a_trace_says_which_calls_a_fault_strikes(kind: FaultKind) -> None:
    """Sweeps leave out the others, whose run would be one without a fault."""
    traced = Faults(keep_trace=True)
    work(FaultyFiles(SimulatedFiles(), traced))
    for call in traced.trace:
        faults = Faults(Fault(call.number, kind))
        with contextlib.suppress(DiskError):
            work(FaultyFiles(SimulatedFiles(), faults))
        assert faults.struck == ([call] if call.can_fail_by(kind) else [])


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("real", [False, True])
def test_a_fault_hits_exactly_the_nth_call(tmp_path: Path, real: bool, moment: Moment) -> None:
    trace = Faults(keep_trace=True)
    work(FaultyFiles(SimulatedFiles(), trace))
    for at in count(1):
        inner = OsFiles(str(tmp_path / str(at))) if real else SimulatedFiles()
        faults = Faults(io_error(at, moment), keep_trace=True)
        try:
            work(FaultyFiles(inner, faults))
        except (DiskError, UnreadableError) as error:
            assert faults.struck == [trace.trace[at - 1]]
            assert faults.trace == trace.trace[:at]
            assert f"(fault at call {at})" in str(error)
            if (call := trace.trace[at - 1].call) == "pread":
                assert isinstance(error, UnreadableError)
                continue
            assert isinstance(error, DiskError) and error.call == call
            syncs = ("pwrite_durable", "fdatasync", "sync_directory")
            assert type(error) is (SyncError if call in syncs else DiskError)
        else:
            assert at == WORK_CALLS + 1
            break
    with inner.lock("lock"):
        pass


@pytest.mark.parametrize("moment", Moment)
def test_a_crash_hits_the_nth_call_and_all_later_ones(moment: Moment) -> None:
    for at in range(1, WORK_CALLS + 1):
        inner = SimulatedFiles(rng=random.Random(at))
        faults = Faults(Fault(at, FaultKind.CRASH, moment))
        files = FaultyFiles(inner, faults)
        with pytest.raises(SimulatedCrash, match=f"{moment.value} call {at}: "):
            work(files)
        assert faults.call_count == at
        with pytest.raises(SimulatedCrash, match=f"came after a .* call {at}: "):
            files.open("d/b", create=True)
        for after in (inner.kill(), inner.crash()):
            with pytest.raises(SimulatedCrash):
                files.open("d/b", create=True)
            with after.lock("lock"):
                pass


def test_code_that_unwinds_after_a_crash_has_no_effect() -> None:
    inner = SimulatedFiles()
    durable_file(inner, "a", b".")
    file = FaultyFiles(inner, Faults(Fault(1, FaultKind.CRASH))).open
    with pytest.raises(SimulatedCrash):
        file("a")
    opened = FaultyFiles(inner, faults := Faults(Fault(2, FaultKind.CRASH))).open("a")
    with pytest.raises(SimulatedCrash, match="close of a came after a simulated crash before call"):
        try:
            opened.pwrite([b"x"], 0)
        finally:
            with contextlib.suppress(SimulatedCrash):
                opened.fdatasync()
            opened.close()
    assert len(faults.struck) == 1
    assert content(inner, "a") == b"."


def test_a_transient_fault_passes_and_a_permanent_one_stays() -> None:
    for for_good in (False, True):
        inner = SimulatedFiles()
        faults = Faults(io_error(2, for_good=for_good))
        file = FaultyFiles(inner, faults).open("a", create=True)
        with fails_as(DiskError, 2):
            file.pwrite([b"x"], 0)
        assert content(inner, "a") == b""
        if for_good:
            for number in (3, 4):
                with fails_as(DiskError, number):
                    file.pwrite([b"x"], 0)
            faults.faults.clear()
        file.pwrite([b"x"], 0)
        assert content(inner, "a") == b"x"


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("call", ["pwrite", "pwrite_durable"])
def test_a_short_write(tmp_path: Path, real: bool, call: str) -> None:
    inner: Files = OsFiles(str(tmp_path)) if real else SimulatedFiles()
    faults = Faults(
        Fault(2, FaultKind.NO_SPACE, Moment.MIDDLE),
        Fault(3, FaultKind.NO_SPACE, Moment.MIDDLE, partial_bytes=3),
        Fault(4, FaultKind.NO_SPACE, Moment.MIDDLE, partial_bytes=99),
    )
    file = FaultyFiles(inner, faults).open("a", create=True)
    write = getattr(file, call)
    for number, expected in ((2, b"ab"), (3, b"abc"), (4, b"abcd")):
        with fails_as(DiskFullError, number):
            write([b"a", b"bc", b"d"], 0)
        assert content(inner, "a") == expected
    write([b"ABCD"], 0)
    assert content(inner, "a") == b"ABCD"
    file.close()


def test_a_full_disk_still_reads_syncs_and_removes() -> None:
    inner = SimulatedFiles()
    durable_file(inner, "a", b"abc")
    files = FaultyFiles(inner, Faults(Fault(1, FaultKind.NO_SPACE, for_good=True)))
    file = files.open("a", create=True)
    for refused in (
        lambda: file.pwrite([b"x"], 0),
        lambda: file.pwrite_durable([b"x"], 0),
        lambda: files.open("b", create=True),
        lambda: files.rename("a", "b"),
        lambda: files.link("a", "b"),
        lambda: files.make_directory("d"),
        lambda: files.lock("lock").__enter__(),
    ):
        with pytest.raises(DiskFullError, match=os.strerror(errno.ENOSPC)):
            refused()
    assert file.pread(9, 0) == b"abc"
    file.truncate(2)
    file.fdatasync()
    file.close()
    assert tree(inner) == {"a": b"ab"}
    files.unlink("a")
    files.sync_directory("")
    assert files.list("") == []


def test_after_a_failed_sync_the_bytes_are_seen_and_never_become_durable() -> None:
    inner = SimulatedFiles()
    durable_file(inner, "a", b"..")
    file = FaultyFiles(inner, Faults(io_error(3))).open("a")
    file.pwrite([b"x"], 0)
    with fails_as(SyncError, 3):
        file.fdatasync()
    file.fdatasync()  # The mistake: it succeeds, and proves nothing.
    assert content(inner, "a") == b"x."
    assert contents(inner, "a") == {b".."}
    after = inner.kill()
    reopened = after.open("a")
    assert reopened.pread(9, 0) == b"x."
    reopened.fdatasync()
    assert contents(after, "a") == {b".."}
    reopened.pwrite([b"x"], 0)  # Written again, they are dirty again.
    reopened.fdatasync()
    assert contents(after, "a") == {b"x."}


def test_a_durable_write_whose_sync_failed() -> None:
    for moment, seen, left in (
        (Moment.BEFORE, b".d.", {b".d."}),
        (Moment.MIDDLE, b".dx", {b".d."}),
        (Moment.AFTER, b".dx", {b".dx"}),
    ):
        inner = SimulatedFiles()
        durable_file(inner, "a", b"...")
        file = FaultyFiles(inner, Faults(io_error(3, moment))).open("a")
        file.pwrite_durable([b"d"], 1)
        with fails_as(SyncError, 3):
            file.pwrite_durable([b"x"], 2)
        assert content(inner, "a") == seen
        assert contents(inner, "a") == left


def test_a_failed_sync_does_not_take_durable_writes_along() -> None:
    inner = SimulatedFiles()
    durable_file(inner, "a", b"...")
    file = FaultyFiles(inner, Faults(io_error(4))).open("a")
    file.pwrite([b"x"], 0)
    file.pwrite_durable([b"d"], 1)
    with fails_as(SyncError, 4):
        file.fdatasync()
    assert contents(inner, "a") == {b".d."}


@pytest.mark.parametrize(("moment", "left"), [("BEFORE", {b".", b"x"}), ("AFTER", {b"x"})])
def test_a_crash_in_a_sync_drops_nothing(moment: str, left: set[bytes]) -> None:
    inner = SimulatedFiles()
    durable_file(inner, "a", b".")
    file = FaultyFiles(inner, Faults(Fault(3, FaultKind.CRASH, Moment[moment]))).open("a")
    file.pwrite([b"x"], 0)
    with pytest.raises(SimulatedCrash):
        file.fdatasync()
    assert contents(inner, "a") == left


def test_a_directory_sync_that_failed_leaves_the_names_at_risk() -> None:
    inner = SimulatedFiles()
    inner.open("a", create=True)
    with fails_as(SyncError, 1):
        FaultyFiles(inner, Faults(io_error(1))).sync_directory("")
    assert trees(inner) == {(), (("a", b""),)}


@pytest.mark.parametrize("real", [False, True])
def test_an_effect_whose_answer_is_lost(tmp_path: Path, real: bool) -> None:
    inner: Files = OsFiles(str(tmp_path)) if real else SimulatedFiles()
    files = FaultyFiles(inner, Faults(io_error(1, Moment.AFTER, for_good=True)))
    with fails_as(DiskError, 1):
        files.open("a", create=True)
    with fails_as(DiskError, 2):
        files.rename("a", "b")
    with fails_as(DiskError, 3), files.lock("lock"):
        pass
    assert inner.list("") == ["b", "lock"]
    with inner.lock("lock"):
        pass


def test_a_plan_may_be_restricted_to_some_calls() -> None:
    faults = Faults(io_error(2), only={"fdatasync"}, keep_trace=True)
    file = FaultyFiles(SimulatedFiles(), faults).open("a", create=True)
    file.pwrite([b"x"], 0)
    file.fdatasync()
    with fails_as(SyncError, 2):
        file.fdatasync()
    file.fdatasync()
    assert faults.trace == [NumberedCall(number, "fdatasync", "a") for number in (1, 2, 3)]
    assert faults.struck == [NumberedCall(2, "fdatasync", "a")]


def test_one_plan_may_serve_several_files() -> None:
    faults = Faults(io_error(2))
    first = FaultyFiles(SimulatedFiles(), faults)
    second = FaultyFiles(SimulatedFiles(), faults)
    first.exists("a")
    with fails_as(DiskError, 2):
        second.exists("a")
