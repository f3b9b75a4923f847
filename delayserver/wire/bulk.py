"""Imports, archives and backups: the requests for all, and the answers about imports and archives.

Cost: of a decoder of msgspec. Threads: values.
"""

from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from delayserver.wire.fields import SIZE_MAX, Name, Strict, Time, When, about, matching, one_of

_STATES: Final = ("waiting", "verifying", "committing", "filing", "adopted")
"""The states of an import."""
Size = Annotated[int, Meta(ge=0, le=SIZE_MAX)]


class ImportSubjectsModel(Strict):
    """The subjects of an import that is about to be staged; none: only to ask."""

    subjects: Annotated[list[Name], Meta(max_length=10_000)]


class ImportBegunModel(msgspec.Struct):
    """The answer to a bulk load that begins."""

    id: str
    state: Annotated[str, one_of("staging", *_STATES)]
    subjects: Annotated[dict[str, int], about("the numbers that stand in the staged rows")]
    now: Annotated[Time, about("the server's clock: a row that is due earlier is due now")]
    delay_max_ms: int
    body_max_bytes: int
    directory: Annotated[
        str, about("identifies the server's data directory; a program that can read it can compare")
    ]


class ImportModel(Strict):
    """A staged import to be adopted."""

    manifest: Annotated[
        str,
        about(
            "its path, below the data directory; where there are shards, it says which",
            max_length=4096,
        ),
    ]


class ImportViewModel(msgspec.Struct):
    """An import."""

    id: str
    state: Annotated[str, one_of(*_STATES)]
    count: Annotated[int, about("rows that were staged")]
    done: Annotated[int, about("of these, how many are verified (then: filed)")]
    accepted: Annotated[int, about("messages that it made")]
    duplicates: Annotated[int, about("rows left out, since their key is taken")]
    conflicts: Annotated[int, about("of the duplicates, those with other content")]
    first_seq: Annotated[int, about("the seq in the id of the first row; 0: not decided")]


class DuplicateModel(msgspec.Struct):
    """A row that was left out."""

    row: Annotated[int, about("counted from 0, in the order of the manifest")]
    id: Annotated[str, about("the message that holds its key")]


class DuplicatesModel(msgspec.Struct):
    """A page of duplicates, in row order."""

    duplicates: list[DuplicateModel]
    cursor: str | None


class ArchiveModel(Strict):
    """The files that an archive of an hour covers; the list of archives has the first four."""

    schedule_bytes: Size
    dispatch_bytes: Size
    last_seq: Annotated[Size, about("of the last entry")]
    count: Annotated[Size, about("entries that were archived")]
    checksum: Annotated[str, about("kept as it is, for people who compare", max_length=256)] = ""
    location: Annotated[str, about("where the archive is, likewise", max_length=4096)] = ""


class ArchiveViewModel(msgspec.Struct):
    """A settled hour; where there are shards, of one of them."""

    hour: Annotated[str, about("in UTC, as in the names of its files", examples=["2026-11-20T15"])]
    state: Literal["waiting", "archived"]
    retired_at: Annotated[Time, about("when everything was settled")]
    count: Annotated[
        int, about("entries: messages, and once more for each time one was moved or tried again")
    ]
    last_seq: int
    schedule_bytes: int
    dispatch_bytes: int
    archived_at: Time | None = None
    checksum: str | None = None
    location: str | None = None
    shard: Annotated[
        int | UnsetType, about("whose hour it is, in a list of all shards; else missing")
    ] = UNSET


class ArchiveConfirmedModel(msgspec.Struct):
    """Answer to a confirmation."""

    hour: str
    state: Literal["archived"]
    archived_at: Time


class ArchivesModel(msgspec.Struct):
    """A page of settled hours, the oldest first."""

    archive: Annotated[bool, about("the setting: whether an hour is kept until it was archived")]
    hours: list[ArchiveViewModel]
    cursor: str | None


BACKUP_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


class BackupModel(Strict):
    """A backup to be made."""

    name: Annotated[Annotated[str, matching(BACKUP_NAME)] | None, about("default: the time")] = None
    verify: Annotated[bool, about("read every byte again, and compare it with all others")] = True


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


BackupState = Literal["running", "complete", "failed"]
BackupStep = Literal["waiting", "copying", "checking"]


Part = TypeVar("Part")


class BackupPartFields(msgspec.Struct, Generic[When], frozen=True):
    """The part of a backup that one shard has made."""

    shard: int
    state: BackupState
    taken_at: When | None
    checkpoint_seq: Annotated[
        int | None, about("the records up to this one are in it, and no other")
    ]


class BackupPartDocument(BackupPartFields[Time], frozen=True):
    """The part of a backup that one shard has made."""


class BackupFields(msgspec.Struct, Generic[When, Part], frozen=True):
    """A backup, or how far it is."""

    name: str
    state: BackupState
    step: BackupStep | None
    started_at: Annotated[When, about("everything that was answered before is in it")]
    taken_at: Annotated[When | None, about("nothing that came later is in it")]
    completed_at: When | None
    total_bytes: int
    done_bytes: int
    copied_bytes: Annotated[int, about("the rest is shared with the files of the backup before")]
    verified: Annotated[bool, about("every byte was read again, and compared with all others")]
    error: str | None
    shards: list[Part]
    log_reaches_at: Annotated[
        When | None,
        about(
            "it can be restored to any moment up to this one, with the message log "
            "behind it; null: to `taken_at` alone"
        ),
    ] = None


class BackupDocument(BackupFields[Time, BackupPartDocument], frozen=True):
    """A backup, or how far it is."""


class BackupListDocument(msgspec.Struct):
    """All backups, the oldest first."""

    backups: list[BackupDocument]
