"""What the fake files add to the contract: power loss and SIGKILL."""

import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import DirectoryLockedError, DiskError, UnreadableError
from storage.files import File, Files
from tests.unit.storage.samples import content
from tests.unit.world.outcomes import (
    contents,
    durable_file,
    outcomes,
    tree,
    trees,
)
from tests.world.storage.files import SECTOR_BYTES, SimulatedFiles

# ---- power loss: content ---------------------------------------------------------------------


def test_synced_writes_are_never_lost() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"one")
    file.pwrite_durable([b"two"], 3)
    assert contents(files, "a") == {b"onetwo"}


def test_unsynced_writes_are_lost_kept_and_reordered() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"....")
    for offset in range(4):
        file.pwrite([b"x"], offset)  # One byte cannot be torn, only lost.
    assert contents(files, "a") == {bytes(case) for case in product(b".x", repeat=4)}


def test_of_overlapping_writes_the_later_one_wins_if_it_survives() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b".")
    file.pwrite([b"1"], 0)
    file.pwrite([b"2"], 0)
    assert contents(files, "a") == {b".", b"1", b"2"}


def test_a_write_is_torn_at_any_byte_and_the_file_may_have_grown_without_it() -> None:
    files = SimulatedFiles()
    durable_file(files, "a").pwrite([b"abcde"], 0)
    torn = {b"abcde"[:kept] for kept in range(6)}
    assert contents(files, "a") == torn | {part.ljust(5, b"\0") for part in torn}


def test_a_write_is_torn_at_sectors_of_the_file() -> None:
    files = SimulatedFiles()
    size = 3 * SECTOR_BYTES
    file = durable_file(files, "a", b"." * size)
    file.pwrite([b"x" * (size - 200)], 100)  # The first and the last sector are partly covered.
    sectors = {
        bytes(data[start] for start in (100, SECTOR_BYTES, size - 101))
        for data in contents(files, "a")
    }
    assert sectors == {bytes(case) for case in product(b".x", repeat=3)}
    assert all(data[:100] + data[-100:] == b"." * 200 for data in contents(files, "a"))


def test_a_lost_write_before_a_kept_one_leaves_zeros() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a")
    file.pwrite([b"1"], 0)
    file.pwrite([b"2"], 1)
    assert contents(files, "a") == {b"", b"1", b"12", b"\x002", b"\0", b"1\0", b"\0\0"}


def test_a_truncate_is_lost_or_kept() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"old!")
    file.truncate(1)
    file.pwrite([b"x"], 2)
    assert contents(files, "a") == {b"old!", b"olx!", b"o", b"o\0x", b"o\0\0"}
    file.fdatasync()
    assert contents(files, "a") == {b"o\0x"}


def test_a_durable_write_does_not_make_earlier_ones_durable() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"...")
    file.pwrite([b"1"], 0)
    file.pwrite([b"1"], 1)
    file.pwrite_durable([b"22"], 1)
    file.pwrite([b"3"], 2)
    assert contents(files, "a") == {b".22", b".23", b"122", b"123"}


def test_each_file_is_synced_for_itself() -> None:
    files = SimulatedFiles()
    file, other = durable_file(files, "a", b"."), durable_file(files, "b", b".")
    file.pwrite([b"x"], 0)
    other.pwrite([b"x"], 0)
    other.fdatasync()
    assert contents(files, "a") == {b".", b"x"}
    assert contents(files, "b") == {b"x"}


def test_what_came_up_after_a_crash_is_durable() -> None:
    files = SimulatedFiles(rng=random.Random(5))
    durable_file(files, "a", b"." * 2000).pwrite([b"x" * 2000], 0)
    files.open("b", create=True)
    after = files.crash()
    assert trees(after) == {tuple(tree(after).items())}


# ---- power loss: names -----------------------------------------------------------------------


def test_a_name_that_was_not_synced_may_vanish_with_its_synced_content() -> None:
    files = SimulatedFiles()
    file = files.open("a", create=True)
    file.pwrite_durable([b"x"], 0)
    assert trees(files) == {(), (("a", b"x"),)}
    files.sync_directory("")
    assert trees(files) == {(("a", b"x"),)}


def test_a_rename_is_atomic() -> None:
    files = SimulatedFiles()
    durable_file(files, "a", b"new")
    durable_file(files, "b", b"old")
    files.rename("a", "b")
    assert trees(files) == {(("a", b"new"), ("b", b"old")), (("b", b"new"),)}
    files.sync_directory("")
    assert trees(files) == {(("b", b"new"),)}


def test_a_rename_does_not_sync_the_content() -> None:
    files = SimulatedFiles()
    durable_file(files, "a").pwrite([b"x"], 0)
    files.rename("a", "b")
    assert (("b", b""),) in trees(files)


def test_a_file_that_made_room_for_another_is_never_lost() -> None:
    files = SimulatedFiles()
    durable_file(files, "log", b"1")
    files.rename("log", "log.old")
    files.open("log", create=True).pwrite_durable([b"2"], 0)
    assert trees(files) == {
        (("log", b"1"),),
        (("log.old", b"1"),),
        (("log", b"2"), ("log.old", b"1")),
    }


def test_an_unlink_is_lost_or_kept() -> None:
    files = SimulatedFiles()
    durable_file(files, "a", b"old")
    files.unlink("a")
    assert trees(files) == {(), (("a", b"old"),)}
    files.open("a", create=True).pwrite_durable([b"new"], 0)
    assert trees(files) == {(), (("a", b"old"),), (("a", b"new"),)}
    files.sync_directory("")
    assert trees(files) == {(("a", b"new"),)}


def test_a_link_is_lost_or_kept_and_is_the_same_file() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"1")
    files.link("a", "b")
    assert trees(files) == {(("a", b"1"),), (("a", b"1"), ("b", b"1"))}
    files.sync_directory("")
    file.pwrite([b"2"], 0)
    assert trees(files) == {(("a", byte), ("b", byte)) for byte in (b"1", b"2")}
    files.unlink("a")
    files.sync_directory("")
    file.fdatasync()
    assert trees(files) == {(("b", b"2"),)}


def test_names_are_reordered() -> None:
    files = SimulatedFiles()
    durable_file(files, "old")
    files.open("new", create=True)
    files.unlink("old")
    assert () in trees(files)  # Unlinked the old one before the new one was durable: both gone.


def test_a_synced_directory_takes_along_what_its_names_were_built_on() -> None:
    files = SimulatedFiles()
    files.make_directory("from")
    files.make_directory("to")
    files.open("from/x", create=True)
    files.open("from/other", create=True)
    files.open("from/a", create=True).pwrite_durable([b"1"], 0)
    files.rename("from/a", "from/x")
    files.rename("from/x", "to/b")
    files.rename("from/other", "from/later")
    files.sync_directory("to")
    machines = outcomes(files)
    assert all(content(machine, "to/b") == b"1" for machine in machines)
    assert {tuple(machine.list("from")) for machine in machines} == {
        (),
        ("other",),
        ("later",),
    }


def test_directories_are_durable_at_once() -> None:
    files = SimulatedFiles()
    files.make_directory("x/y")
    assert all(files.crash().list("x") == ["y"] for _ in range(50))


# ---- the machine and the process -------------------------------------------------------------


def every_call(files: Files, file: File) -> list[Callable[[], object]]:
    return [
        lambda: file.pread(1, 0),
        lambda: file.pwrite([b"x"], 0),
        lambda: file.pwrite_durable([b"x"], 0),
        file.fdatasync,
        lambda: file.truncate(0),
        file.size,
        lambda: files.open("a"),
        lambda: files.exists("a"),
        lambda: files.list(""),
        lambda: files.rename("a", "b"),
        lambda: files.link("b", "c"),
        lambda: files.unlink("b"),
        lambda: files.make_directory("d"),
        lambda: files.sync_directory(""),
        files.free_bytes,
        lambda: files.lock("lock").__enter__(),
    ]


@pytest.mark.parametrize("end", [SimulatedFiles.crash, SimulatedFiles.kill])
def test_a_machine_that_is_off_cannot_be_used(
    end: Callable[[SimulatedFiles], SimulatedFiles],
) -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"old")
    after = end(files)
    for call in every_call(files, file):
        with pytest.raises(DiskError, match="off"):
            call()
    file.close()  # Does no harm, so that code which is unwinding can do it.
    assert tree(after) == {"a": b"old"}


@pytest.mark.parametrize("end", [SimulatedFiles.crash, SimulatedFiles.kill])
def test_locks_end_with_the_machine(end: Callable[[SimulatedFiles], SimulatedFiles]) -> None:
    files = SimulatedFiles()
    with files.lock("lock"):
        files.sync_directory("")
        after = end(files)
        with after.lock("lock"):
            pass
    with (
        after.lock("lock"),
        pytest.raises(DirectoryLockedError, match="in use by process 1;"),
        after.lock("lock"),
    ):
        pass


def test_root_and_free_space_outlive_a_crash() -> None:
    files = SimulatedFiles(root="disk")
    files.free_space_bytes = 7
    after = files.crash().kill()
    assert (after.root, after.free_bytes()) == ("disk", 7)


def test_sigkill_keeps_all_that_was_written_and_makes_nothing_durable() -> None:
    files = SimulatedFiles()
    durable_file(files, "a", b".").pwrite([b"x"], 0)
    durable_file(files, "b")
    files.rename("b", "c")
    after = files.kill()
    assert tree(after) == {"a": b"x", "c": b""}
    assert trees(after) == {
        (("a", data), (name, b"")) for data, name in product([b".", b"x"], "bc")
    }
    after.open("a").fdatasync()
    after.sync_directory("")
    assert trees(after) == {(("a", b"x"), ("c", b""))}


def test_the_next_machine_does_not_write_into_the_last_one() -> None:
    files = SimulatedFiles()
    durable_file(files, "a", b"old").pwrite([b"!"], 0)
    for after in (files.kill(), files.crash()):
        file = after.open("a")
        file.pwrite_durable([b"new"], 0)
        file.truncate(9)
    assert tree(files.kill()) == {"a": b"!ld"}
    assert b"old" in contents(files, "a")


def scenario(seed: int) -> list[dict[str, bytes]]:
    """Some writes and crashes; what was on the disk after each crash."""
    rng = random.Random(seed)
    files = SimulatedFiles(rng=rng)
    states: list[dict[str, bytes]] = []
    for turn in range(10):
        for name in ("a", "b", "c"):
            file = files.open(name, create=True)
            file.pwrite([rng.randbytes(3000)], rng.randrange(2000))
            if rng.random() < 0.3:
                file.fdatasync()
        files.rename("a", f"turn-{turn}")
        files = files.crash()
        states.append(tree(files))
    return states


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert scenario(1) == scenario(1)
    assert scenario(1) != scenario(2)


# ---- a property: all that is found was written, all that was synced is found ------------------

NAMES = ("a", "b", "c")
paths = st.sampled_from(NAMES)
offsets = st.integers(0, 1200)
lengths = st.integers(1, 1200)
operations = st.one_of(
    st.tuples(st.just("pwrite"), paths, offsets, lengths),
    st.tuples(st.just("pwrite_durable"), paths, offsets, lengths),
    st.tuples(st.just("truncate"), paths, offsets, st.just(0)),
    st.tuples(st.just("fdatasync"), paths, st.just(0), st.just(0)),
    st.tuples(st.just("rename to a"), paths, st.just(0), st.just(0)),
    st.tuples(st.just("rename to b"), paths, st.just(0), st.just(0)),
    st.tuples(st.just("unlink"), paths, st.just(0), st.just(0)),
    st.tuples(st.just("sync_directory"), st.just(""), st.just(0), st.just(0)),
)


class ContentModel:
    """What each byte of a file, and its size, may be after a crash."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.durable_at: dict[int, int] = {}
        self.unsynced: list[tuple[int, bytes | None]] = []
        self.may_be: list[set[int]] = []
        self.sizes = {0}

    def _reach(self, size: int) -> None:
        self.may_be.extend({0} for _ in range(size - len(self.may_be)))

    def write(self, offset: int, data: bytes, *, durable: bool) -> None:
        end = offset + len(data)
        self.now.extend(bytes(max(0, end - len(self.now))))
        self.now[offset:end] = data
        self._reach(end)
        for index, byte in enumerate(data, offset):
            self.may_be[index] = {byte} if durable else self.may_be[index] | {byte}
        if durable:
            self.sizes = {max(size, end) for size in self.sizes}
        else:
            smallest = min(self.sizes)
            self.sizes |= {size for size in range(offset + 1, end + 1) if size > smallest}

    def truncate(self, length: int) -> None:
        del self.now[length:]
        self.now.extend(bytes(length - len(self.now)))
        self._reach(length)
        for index in range(length, len(self.may_be)):
            self.may_be[index] = self.may_be[index] | {0}
        self.sizes |= {length}

    def sync(self) -> None:
        self.may_be = [{byte} for byte in self.now]
        self.sizes = {len(self.now)}

    def explains(self, found: bytes) -> bool:
        return len(found) in self.sizes and all(
            byte in may_be for byte, may_be in zip(found, self.may_be, strict=False)
        )


class NamesModel:
    """All that a directory may look like after a crash. A file is a number here."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.may_be: list[dict[str, int]] = [{}]

    def change(self, changes: dict[str, int | None]) -> None:
        """Give these names these files, atomically, where they are as they are now."""

        def changed(names: dict[str, int]) -> dict[str, int]:
            merged = {**names, **changes}
            return {name: file for name, file in merged.items() if file is not None}

        for names in list(self.may_be):
            as_now = all(names.get(name) == self.now.get(name) for name in changes)
            if as_now and changed(names) not in self.may_be:
                self.may_be.append(changed(names))
        self.now = changed(self.now)

    def sync(self) -> None:
        self.may_be = [self.now]


@given(st.integers(), st.lists(operations, max_size=25))
def test_what_a_crash_leaves_is_explained_by_what_was_done(
    seed: int, steps: list[tuple[str, str, int, int]]
) -> None:
    files = SimulatedFiles(rng=random.Random(seed))
    names = NamesModel()
    models: list[ContentModel] = []
    for step, (action, path, offset, length) in enumerate(steps):
        data = bytes([step + 1]) * length
        if action.startswith("pwrite") or action in ("truncate", "fdatasync"):
            file = files.open(path, create=True)
            if path not in names.now:
                names.change({path: len(models)})
                models.append(ContentModel())
            model = models[names.now[path]]
            if action == "pwrite":
                file.pwrite([data], offset)
                model.write(offset, data, durable=False)
            elif action == "pwrite_durable":
                file.pwrite_durable([data], offset)
                model.write(offset, data, durable=True)
            elif action == "truncate":
                file.truncate(offset)
                model.truncate(offset)
            else:
                file.fdatasync()
                model.sync()
        elif action == "sync_directory":
            files.sync_directory("")
            names.sync()
        elif path in names.now:
            if action == "unlink":
                files.unlink(path)
                names.change({path: None})
            elif (target := action[-1]) != path:
                files.rename(path, target)
                names.change({path: None, target: names.now[path]})

    killed = files.kill()
    assert tree(killed) == {path: bytes(models[file].now) for path, file in names.now.items()}
    for machine in (files.crash(), files.crash(), killed.crash()):
        found = tree(machine)
        assert any(
            found.keys() == may_be.keys()
            and all(models[file].explains(found[path]) for path, file in may_be.items())
            for may_be in names.may_be
        ), (found, names.may_be)


# ---- bad sectors and slow syncs --------------------------------------------------------------


def test_a_bad_sector_stays_bad() -> None:
    files = SimulatedFiles()
    file = durable_file(files, "a", b"0123456789")
    files.sync_directory("")
    files.fail_reads("a", 4, 6)
    files.rename("a", "b")
    files.sync_directory("")
    file.pwrite_durable([b"x" * 10], 0)
    for machine in (files, files.kill(), files.crash(), files.kill().crash()):
        machine.is_off = False
        found = machine.open("b")
        assert (found.pread(4, 0), found.pread(10, 6)) == (b"xxxx", b"xxxx")
        for length, offset in ((5, 0), (1, 4), (1, 5), (10, 0)):
            with pytest.raises(UnreadableError, match=f"b is damaged at offset {offset}"):
                found.pread(length, offset)
            assert all(found.pread_now(length, offset) is None for _ in range(9))
        machine.mend_reads()
        assert found.pread(10, 0) == b"x" * 10


def test_a_sync_may_take_its_time() -> None:
    files, durable = SimulatedFiles(), []

    def on_sync() -> None:
        durable.append(contents(files, "a"))

    file = durable_file(files, "a", b"old")
    files.on_sync = on_sync
    file.pwrite([b"new"], 0)
    file.fdatasync()
    file.pwrite_durable([b"now"], 0)
    files.sync_directory("")
    assert durable[0] >= {b"old", b"new"} and durable[1:] == [{b"new"}, {b"now"}]
    assert files.kill().on_sync is on_sync
