"""FORMAT.md and the code say the same."""

import re
import struct
from importlib.resources import files
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.imports.records import Archived
from delayserver.parts.schedules.records import (
    Schedule,
    ScheduleChange,
    ScheduleState,
    unpack_state,
)
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.definitions import TABLE_NUMBERS
from delayserver.records.direct import Destination
from delayserver.records.message import MessageOptions, Origin, Payload, ScheduledRun, Watch
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    DEFINITIONS_KEY,
    KEYS_AHEAD_KEY,
    LIVE_KEY,
    DeadLetter,
)
from delayserver.schedule.expansion import ImportRecord, ImportState
from storage.catalog import PART_TABLES, Table
from storage.directory import FORMAT_FILE, FORMAT_VERSION, open_identity
from storage.frame import HEADER, HEADER_BYTES, MAGIC, VERSION, Header
from storage.key_runs import RUNS_KEY
from storage.notes import Note
from storage.replicated import envelope
from storage.replicated.envelope import ENVELOPE, ENVELOPE_BYTES, Beat, Envelope, RecordType
from storage.replicated.log import OFFICE_KEY, OWNER_KEY, SEIZED_KEY, SETTLED_KEY
from storage.replicated.meta import (
    ID_SECRET_BYTES,
    LINK_SECRET_BYTES,
    AdoptRecord,
    ClusterIdentity,
    DrainRecord,
    ForgetRecord,
    MoveRecord,
    NodeRecord,
)
from storage.replicated.office import OFFICE, OfficeState
from storage.replicated.own import OWN_FILE, OwnLog
from storage.replicated.settled import ROWS_MAX
from storage.rows import DTYPES, PART_NUMBERS, REMOVES, SCHEDULES, LogKind, Outcome, RecordKind
from storage.staging import DIRECTORY, Manifest, Part, write_manifest
from tests.unit.storage.samples import content
from tests.world.storage.files import SimulatedFiles

DOCUMENT = files("storage").joinpath("FORMAT.md").read_text(encoding="utf-8")
NUMPY_TYPES = {
    "u8": "u1",
    "u16": "<u2",
    "u32": "<u4",
    "u64": "<u8",
    "i64": "<i8",
    "16 bytes": "V16",
}
STRUCT_TYPES = {"4 bytes": "4s", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


def tables(heading: str) -> list[list[list[str]]]:
    """The tables below a heading, each as rows of cells without the title row."""
    _, found, below = DOCUMENT.partition(f"\n{heading}\n")
    assert found, heading
    section = re.split(r"\n##+ ", below)[0]
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    ]


def field_name(cell: str) -> str:
    assert cell.startswith("`") and cell.endswith("`"), cell
    return cell.strip("`")


def test_the_header() -> None:
    (rows,) = tables("### Header")
    assert tuple(field_name(row[0]) for row in rows) == Header._fields
    formats = [STRUCT_TYPES[row[2]] for row in rows]
    assert HEADER.format == "<" + "".join(formats)
    offsets = [struct.calcsize("<" + "".join(formats[:index])) for index in range(len(rows))]
    assert [int(row[1]) for row in rows] == offsets
    assert HEADER_BYTES == 64
    assert f"`{MAGIC.decode()}`" in rows[0][3]


def test_the_versions() -> None:
    assert DOCUMENT.startswith(f"# The bytes of a data directory, version {FORMAT_VERSION}\n")
    assert f"version of the frame: {VERSION}" in DOCUMENT
    assert f"version of the directory: {FORMAT_VERSION}" in DOCUMENT


@pytest.mark.parametrize("kind", LogKind)
def test_the_columns(kind: LogKind) -> None:
    dtype = DTYPES[kind]
    heading = f"### Rows of the {kind.name.lower()} log (kind {kind:d}, {dtype.itemsize} bytes)"
    rows = tables(heading)[0]
    documented = np.dtype(
        {
            "names": [field_name(row[0]) for row in rows],
            "offsets": [int(row[1]) for row in rows],
            "formats": [NUMPY_TYPES[row[2]] for row in rows],
            "itemsize": dtype.itemsize,
        }
    )
    assert documented == dtype


def test_the_kinds_of_records() -> None:
    dtype = DTYPES[LogKind.MESSAGE]
    rows = tables(f"### Rows of the message log (kind 1, {dtype.itemsize} bytes)")[1]
    assert [(int(row[0]), row[1]) for row in rows] == [(int(k), k.name) for k in RecordKind]
    assert {RecordKind(int(row[0])) for row in rows if row[2]} == set(SCHEDULES)
    removing = {RecordKind(int(row[0])) for row in rows if row[3] and row[3] != "the dead letter"}
    assert removing == set(REMOVES)


def test_the_kinds_of_logs_and_the_outcomes() -> None:
    (header,) = tables("### Header")
    assert ", ".join(f"{kind:d} {kind.name.lower()}" for kind in LogKind) in header[2][3]
    rows = tables("### Rows of the dispatch log (kind 3, 40 bytes)")[0]
    for outcome in Outcome:
        assert f"{outcome:d} {outcome.name.lower()}" in rows[-2][3]


RECORDS = [
    *(Payload, Watch, MessageOptions, Destination, History, DeliveryAttempt, ScheduledRun, Origin),
    *(DeadLetter, Heartbeat, ScheduleChange, Schedule, ImportRecord, Note),
]


@pytest.mark.parametrize("record", RECORDS)
def test_the_payloads(record: type[msgspec.Struct]) -> None:
    (rows,) = tables(f"### {record.__name__}")
    names = [field_name(row[1]) for row in rows]
    assert tuple(names) == record.__struct_fields__
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert record.__struct_config__.array_like
    wanted = {
        int: "int",
        str: "str",
        bytes: "bin",
        str | None: "str or nil",
        int | None: "int or nil",
        bytes | None: "bin or nil",
    }
    hints = get_type_hints(record)
    for name, row in zip(names, rows, strict=True):
        assert wanted.get(hints[name], row[2]) == row[2]


def test_the_state_of_a_schedule() -> None:
    (rows,) = tables("### ScheduleState")
    assert tuple(field_name(row[0]) for row in rows) == ScheduleState.__struct_fields__
    types = {"bool": "?"} | {one: STRUCT_TYPES[one] for one in ("u64", "i64")}
    numbers = [True if row[1] == "bool" else at for at, row in enumerate(rows, 1)]
    packed = struct.pack(">" + "".join(types[row[1]] for row in rows), *numbers)
    state = unpack_state(packed)
    assert list(msgspec.structs.astuple(state)) == numbers
    assert state.pack() == packed
    assert f"or {len(packed)} bytes" in DOCUMENT


def test_the_format_file() -> None:
    (rows,) = tables("### FORMAT")
    disk = SimulatedFiles()
    open_identity(disk, random_bytes=bytes)
    made = msgspec.json.decode(content(disk, FORMAT_FILE))
    assert [field_name(row[0]) for row in rows] == list(made)


def test_the_manifest_of_an_import() -> None:
    (rows,) = tables("### Manifest")
    disk = SimulatedFiles()
    disk.make_directory(DIRECTORY)
    manifest = Manifest("a", 1, 2, (Part("a.0.part", 3, 4, 5),))
    made = msgspec.json.decode(content(disk, write_manifest(disk, manifest)))
    assert {field_name(row[0]) for row in rows} == set(made)
    assert set(re.findall(r"`(\w+)`", rows[-1][2])) == set(made["parts"][0])


def test_the_value_of_an_import() -> None:
    (rows,) = tables("## The catalog")
    (cell,) = (row[2] for row in rows if row[0] == "`imports`")
    assert tuple(re.findall(r"`(\w+)`", cell)) == ImportState.__struct_fields__[:-1]


def test_the_value_of_an_archive() -> None:
    (rows,) = tables("## The catalog")
    (cell,) = (row[2] for row in rows if row[0] == "`archives`")
    assert tuple(re.findall(r"`(\w+)`", cell)) == Archived.__struct_fields__


def test_the_tables_of_the_catalog() -> None:
    (rows,) = tables("## The catalog")
    assert [field_name(row[0]) for row in rows] == [table.value for table in Table]


def test_the_tables_of_the_definitions_log() -> None:
    (rows,) = tables("### Rows of the definitions log (kind 4, 24 bytes)")
    (cell,) = (row[3] for row in rows if row[0] == "`table`")
    of_core = [(number, name) for name, number in TABLE_NUMBERS.items() if name in set(Table)]
    assert cell == ", ".join(f"{number} `{name}`" for number, name in of_core)


def test_the_numbers_of_parts() -> None:
    assert f"from {PART_NUMBERS[0]} to {PART_NUMBERS[-1]} are for parts" in DOCUMENT
    assert not {*RecordKind} & {*PART_NUMBERS}
    assert {Table(f"part_{number}"): number for number in PART_NUMBERS} == PART_TABLES


def test_the_names_in_meta() -> None:
    (rows,) = tables("## The catalog")
    (cell,) = (row[1] for row in rows if row[0] == "`meta`")
    of_all = (CHECKPOINT_KEY, DEFINITIONS_KEY, KEYS_AHEAD_KEY, LIVE_KEY, RUNS_KEY)
    names = (*of_all, OFFICE_KEY, SETTLED_KEY, OWNER_KEY, SEIZED_KEY)
    assert cell == ", ".join(f"`{name.decode()}`" for name in names)


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("hours", "_HOUR_VALUE"),
        ("keys", "_KEY_VALUE"),
        ("changes", "_CHANGE_VALUE"),
        ("watches", "WATCH_VALUE"),
    ],
)
def test_the_values_of_the_catalog(table: str, value: str) -> None:
    from delayserver.records import tables as catalog_tables

    (rows,) = tables("## The catalog")
    (cell,) = (row[2] for row in rows if row[0] == f"`{table}`")
    types = re.findall(r"`\w+` ([ui]\d+)", cell)
    letters = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}
    assert getattr(catalog_tables, value).format == ">" + "".join(letters[t] for t in types)


def test_the_envelope_of_a_replicated_log() -> None:
    rows = tables("### Envelope")[0]
    assert tuple(field_name(row[0]) for row in rows) == Envelope._fields
    formats = [STRUCT_TYPES[row[2]] for row in rows]
    assert ENVELOPE.format == "<" + "".join(formats)
    offsets = [struct.calcsize("<" + "".join(formats[:index])) for index in range(len(rows))]
    assert [int(row[1]) for row in rows] == offsets
    assert f"`{envelope.MAGIC.decode()}`" in rows[0][3]
    assert f"A record is {ENVELOPE_BYTES} bytes of envelope and a body." in DOCUMENT


def test_the_records_of_a_replicated_log() -> None:
    rows = tables("### Envelope")[1]
    assert [(int(row[0]), row[1]) for row in rows] == [(int(t), t.name) for t in RecordType]
    bodies = {
        RecordType.CLAIM: envelope.CLAIM_BODY,
        RecordType.BEAT: envelope.BEAT_BODY,
        RecordType.RELEASE: envelope.RELEASE_BODY,
        RecordType.ADOPT: envelope.ADOPT_BODY,
    }
    for row in rows:
        types = re.findall(r"`\w+` ([ui]\d+)", row[2])
        body = bodies.get(RecordType(int(row[0])))
        assert (body.format if body else "<") == "<" + "".join(STRUCT_TYPES[t] for t in types)
    assert re.findall(r"`(\w+)` [ui]", rows[2][2]) == list(Beat.__slots__)
    assert f"{envelope.PART_MAX_BYTES // 1024} KiB" in rows[1][2]


def test_the_state_of_an_office() -> None:
    (rows,) = tables("### OfficeState")
    assert tuple(field_name(row[0]) for row in rows) == OfficeState._fields
    assert OFFICE.format == ">" + "".join(STRUCT_TYPES[row[1]] for row in rows)
    assert f"big-endian, {OFFICE.size} bytes" in DOCUMENT


def test_what_a_cluster_is() -> None:
    (rows,) = tables("### What a cluster is")
    kinds = (ClusterIdentity, NodeRecord, DrainRecord, ForgetRecord, MoveRecord, AdoptRecord)
    fields = [field for kind in kinds for field in kind.__struct_fields__]
    assert [field_name(row[0]) for row in rows] == fields
    assert f"{ID_SECRET_BYTES} bytes" in rows[5][2]
    assert f"{LINK_SECRET_BYTES} bytes" in rows[6][2]


def test_what_is_settled_and_the_own_log() -> None:
    _, _, below = DOCUMENT.partition("### Records of what is settled\n")
    assert f"up to {ROWS_MAX:,} rows" in below
    disk = SimulatedFiles()
    own = OwnLog(disk, lambda: pytest.fail("nobody reads it"))
    own.take_over(7)
    (text,) = content(disk, OWN_FILE).decode().splitlines()
    assert msgspec.json.decode(text) == {"epoch": 7}
    assert f"The file {OWN_FILE} is JSON with one number, `epoch`" in below
