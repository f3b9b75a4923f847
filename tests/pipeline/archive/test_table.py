"""The table of an archive by itself: versions, commits, what nobody names."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.types import LongType, NestedField, StringType, StructType
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.errors import PipelineError
from delayserver.pipeline.archive import table as tables
from delayserver.pipeline.archive.catalog import HINT, ArchiveConflictError, DirectoryCatalog
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.rows import ROW_TYPES
from delayserver.pipeline.archive.table import RUNS, TASK_S, ArchiveTable
from tests.pipeline.archive.made import HOUR, made_file


@pytest.fixture
def place(tmp_path: Path) -> ArchivePlace:
    return ArchivePlace(str(tmp_path / "archive"))


def seqs_of(place: ArchivePlace) -> list[int]:
    return sorted(StaticTable.from_metadata(place.url).scan().to_arrow()["seq"].to_pylist())


def test_its_columns_are_those_of_the_rows() -> None:
    found = from_arrow_schema(schema_to_pyarrow(tables.SCHEMA, include_field_ids=False))
    expected = from_arrow_schema(pa.schema(list(ROW_TYPES.items())))
    assert found.simpleString() == expected.simpleString()


def test_the_numbers_of_its_fields_are_those_that_it_is_made_with(place: ArchivePlace) -> None:
    table = ArchiveTable(place)
    assert table.file_schema == schema_to_pyarrow(tables.SCHEMA)


def test_files_count_when_they_were_added_and_all_at_once(place: ArchivePlace) -> None:
    table = ArchiveTable(place, buckets=5)
    first, second = made_file(table, range(10)), made_file(table, range(10, 20), hour=HOUR + 30)
    assert table.files_of("s", 0, [HOUR]) == []
    table.add([first, second], [{"hour": "one"}])
    for found in (table, ArchiveTable(place)):
        assert found.files_of("s", 0, [HOUR]) == [first.name]
        assert found.files_of("s", 0, [HOUR, HOUR + 30]) == [first.name, second.name]
        assert found.files_of("s", 0, []) == found.files_of("s", 1, [HOUR]) == []
        assert found.files_of("t", 0, [HOUR]) == found.files_of("s", 0, [HOUR + 1]) == []
        assert found.layout("s", 0, {}).buckets == 5
    assert seqs_of(place) == list(range(20))


def test_of_two_jobs_one_adds(place: ArchivePlace) -> None:
    one = ArchiveTable(place)
    one.add([made_file(one, range(5))], [])
    one, two = ArchiveTable(place), ArchiveTable(place)
    one.add([made_file(one, range(10, 15))], [])
    with pytest.raises(ArchiveConflictError, match="run it again"):
        two.add([made_file(two, range(20, 25))], [])
    assert seqs_of(place) == [*range(5), *range(10, 15)]
    three = ArchiveTable(place)
    three.add([made_file(three, range(30, 31))], [])
    assert len(seqs_of(place)) == 11


def test_a_table_is_begun_once(place: ArchivePlace) -> None:
    one, two = ArchiveTable(place), ArchiveTable(place)
    one.add([made_file(one, range(5))], [])
    with pytest.raises(ArchiveConflictError):
        two.add([made_file(two, range(5, 10))], [])
    assert seqs_of(place) == list(range(5))


def test_the_newest_version_is_found_without_its_hint(place: ArchivePlace) -> None:
    table = ArchiveTable(place)
    for number in range(3):
        table.add([made_file(table, range(number * 5, number * 5 + 5))], [])
    for hint in (b"1", b"", b"99", None):
        if hint is None:
            place.delete(HINT)
        else:
            place.replace(HINT, hint)
        found = DirectoryCatalog(place).find()
        assert found is not None and len(found.snapshots()) == 3


def test_what_no_snapshot_names_is_deleted_after_a_run_that_did_not_end(
    place: ArchivePlace,
) -> None:
    table = ArchiveTable(place)
    with table.running("one"):
        table.add([made_file(table, range(5))], [])
    whole = place.files_below("")
    with pytest.raises(ZeroDivisionError), table.running("two"):
        lost = made_file(table, range(5, 10))
        raise ZeroDivisionError
    assert place.exists(lost.name)
    (note,) = place.leftovers(RUNS)
    for _ in range(2):
        with ArchiveTable(place).running("three"):
            assert not place.exists(lost.name)
        # A task of that run may be at work yet.
        assert place.leftovers(RUNS) == [note]
    written_s = time.time() - TASK_S - 1
    os.utime(place.path(note), (written_s, written_s))
    with ArchiveTable(place).running("four"):
        pass
    assert place.files_below("").keys() == whole.keys()
    assert seqs_of(place) == list(range(5))


def test_files_are_replaced_at_once_and_go_with_the_snapshots_that_name_them(
    place: ArchivePlace,
) -> None:
    table = ArchiveTable(place)
    small = [made_file(table, range(number * 5, number * 5 + 5)) for number in range(3)]
    for one in small:
        table.add([one], [])
    other = made_file(table, range(100, 110), hour=HOUR + 48)
    table.add([other], [])
    groups = ArchiveTable(place).small_files(1 << 20)
    assert sorted(map(sorted, groups)) == [sorted(one.name for one in small), [other.name]]
    assert ArchiveTable(place).small_files(10) == []
    table.replace([one.name for one in small], [made_file(table, range(15, 30))])
    assert seqs_of(place) == [*range(15, 30), *range(100, 110)]
    assert table.sweep() == []
    assert all(place.exists(one.name) for one in small)
    assert table.expire() == 0
    assert table.expire(age_s=-1) > 3
    assert not any(place.exists(one.name) for one in small)
    assert seqs_of(place) == [*range(15, 30), *range(100, 110)]
    found = ArchiveTable(place)
    found.add([made_file(found, range(200, 201))], [])
    assert len(seqs_of(place)) == 26


def test_a_file_that_only_an_executor_sees_is_named(place: ArchivePlace) -> None:
    table = ArchiveTable(place)
    file = made_file(table, range(5))
    place.delete(file.name)
    with pytest.raises(PipelineError, match="mount the same directory"):
        table.add([file], [])


def test_manifests_are_merged(place: ArchivePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables._PROPERTIES, "commit.manifest.min-count-to-merge", "3")
    table = ArchiveTable(place)
    for number in range(7):
        table.add([made_file(table, range(number, number + 1))], [])
    assert table.current is not None
    snapshot = table.current.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.current.io)) <= 3
    # Those that became one while they were written are named by nobody.
    assert all(name.endswith("-m0.avro") for name in table.sweep())
    assert seqs_of(place) == list(range(7))


def test_columns_that_others_change_stop_nothing(place: ArchivePlace) -> None:
    """Any engine may add, rename, drop and move columns; what is added afterwards is all there."""
    table = ArchiveTable(place)
    table.add([made_file(table, range(5))], [])
    found = DirectoryCatalog(place).find()
    assert found is not None
    with found.update_schema() as update:
        update.add_column("cost_center", StringType())
        update.add_column("region", StructType(NestedField(1, "name", StringType())))
        update.rename_column("made_by", "origin")
        update.move_first("cost_center")
        update.update_column("attempt", LongType())
        update.delete_column("body_bytes")
    table = ArchiveTable(place)
    table.add([made_file(table, range(5, 9))], [])
    assert seqs_of(place) == list(range(9))
    rows = StaticTable.from_metadata(place.url).scan().to_arrow()
    assert rows["cost_center"].null_count == 9
    assert "origin" in rows.column_names
    assert len(table.small_files(1 << 30)) == 1


class OtherProgram(ArchiveTable):
    """Writes all columns that the table has now."""

    @property
    def _own_schema(self) -> Schema:
        return self._metadata.schema()


def test_a_file_with_columns_of_others_is_not_written_anew(place: ArchivePlace) -> None:
    table = ArchiveTable(place)
    own = made_file(table, range(5))
    table.add([own], [])
    found = DirectoryCatalog(place).find()
    assert found is not None
    with found.update_schema() as update:
        update.add_column("cost_center", StringType())
    other = OtherProgram(place)
    filled = made_file(other, range(5, 9))
    other.add([filled], [])
    table = ArchiveTable(place)
    assert [list(some) for some in table.small_files(1 << 30)] == [[own.name]]
    table.refuse_others([own.name])
    with pytest.raises(PipelineError, match=r"holds columns of other programs \(cost_center\)"):
        table.refuse_others([own.name, filled.name])


# ---- a kill at any point -----------------------------------------------------------------------


class Killed(BaseException):
    """The job ends here, and cleans nothing up."""


CHANGES = ("create", "replace", "sync", "delete", "rename")


def killed_in(at: int, place: ArchivePlace, patch: pytest.MonkeyPatch) -> bool:
    """Archive an hour anew until the call number `at` that changes something; whether that came."""
    calls = itertools.count(1)

    def mortal(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if next(calls) == at:
                raise Killed
            return original(*arguments)

        return call

    table = ArchiveTable(place)
    outdated = table.files_of("s", 0, [HOUR])
    with patch.context() as planted:
        for name in CHANGES:
            planted.setattr(ArchivePlace, name, mortal(getattr(ArchivePlace, name)))
        try:
            with table.running("again"):
                table.replace(outdated, [made_file(table, range(100, 110))], [{"hour": "one"}])
        except Killed:
            return True
    return False


def test_an_hour_that_is_archived_anew_is_never_out_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for at in itertools.count(1):
        place = ArchivePlace(str(tmp_path / f"archive-{at}"))
        table = ArchiveTable(place)
        table.add([made_file(table, range(10))], [])
        was_killed = killed_in(at, place, monkeypatch)
        seqs = tuple(seqs_of(place))
        assert seqs in (tuple(range(10)), tuple(range(100, 110))), at
        found.add(seqs)
        # The next run deletes what nobody names, and the hour stays.
        with ArchiveTable(place).running("next"):
            pass
        assert tuple(seqs_of(place)) == seqs
        if not was_killed:
            break
    assert len(found) == 2 and at > 5
