"""Bulk: imports of the rows that a bulk load has staged, and archives of hours that are settled.

The rows themselves do not go through HTTP: a bulk load writes files below the data directory, and
an archive is made of the hours' files.

Where there are shards, each has imports and archives of its own: a call says with `shard` which one
it is for (`delayserver.shards.router` sends it there; a server alone has no use for it).

Cost: about 100 µs per call; the list of archives reads all retired hours. Threads: belongs to the
event loop.
"""

import asyncio
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response

from delayserver.api.documents import encode
from delayserver.api.rest.common import (
    CONFLICT,
    INVALID,
    LOGGED,
    MISSING,
    PAGE_MAX,
    PartsOf,
    PlacesHeader,
    json_answer,
    json_of,
    shard_page,
)
from delayserver.api.rest.openapi import answer, json_body
from delayserver.config import Settings
from delayserver.errors import ConflictError, InputError, NotFoundError
from delayserver.parts.imports.archives import ArchivableHour, confirming, kept_hours
from delayserver.parts.imports.imports import Import, Imports
from delayserver.parts.imports.records import Archived
from delayserver.server.calls import Calls
from delayserver.server.futures import answering
from delayserver.times import format_time
from delayserver.wire.bulk import (
    ArchiveConfirmedModel,
    ArchiveModel,
    ArchivesModel,
    ArchiveViewModel,
    DuplicateModel,
    DuplicatesModel,
    ImportBegunModel,
    ImportModel,
    ImportSubjectsModel,
    ImportViewModel,
)
from delayserver.wire.reading import read
from storage.buckets import hour_name, parse_hour
from storage.shards import SHARDS_MAX

DUPLICATES_PAGE_MAX = 10_000
HOUR_PATTERN = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}"

ImportPath = Annotated[str, Path(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HourPath = Annotated[
    str, Path(pattern=f"^{HOUR_PATTERN}$", description="the hour in UTC, such as 2026-11-20T15")
]
OF_SHARD: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "shard",
            "in": "query",
            "required": False,
            "description": "where there are shards: which one",
            "schema": {"type": "integer", "minimum": 0, "maximum": SHARDS_MAX - 1},
        }
    ]
}
"""Parameters that the router reads, and no handler."""

router = APIRouter()
archives_router = APIRouter()


@router.put(
    "/v1/imports/{import_id}",
    tags=["bulk"],
    responses=INVALID | LOGGED | {200: answer(ImportBegunModel)},
    openapi_extra=OF_SHARD | json_body(ImportSubjectsModel),
)
async def begin_import(import_id: ImportPath, request: Request, parts: PartsOf) -> Response:
    """Begin a bulk load: the numbers of its subjects, and whether it was adopted before."""
    wanted = read(await json_of(request), ImportSubjectsModel)
    _refuse_in_a_cluster(parts.calls.settings)
    imports = parts.calls.part(Imports)
    try:
        state = str(imports.find(import_id).stage)
    except NotFoundError:
        state = "staging"
    numbers, group = imports.begin(wanted.subjects)
    await parts.calls.durable(group)
    return json_answer(
        ImportBegunModel(
            id=import_id,
            state=state,
            subjects=numbers,
            now=format_time(parts.calls.clock()),
            delay_max_ms=parts.calls.settings.delay_max_ms,
            body_max_bytes=parts.calls.settings.body_max_bytes,
            directory=parts.calls.directory,
        )
    )


@router.post(
    "/v1/imports",
    tags=["bulk"],
    status_code=201,
    responses=CONFLICT | LOGGED | {201: answer(ImportViewModel)},
    openapi_extra=OF_SHARD | json_body(ImportModel),
)
async def adopt_import(request: Request, parts: PartsOf) -> Response:
    """Adopt the rows that a bulk load has staged, all or nothing. The import is durable when this
    answers; the same again is answered the same."""
    wanted = read(await json_of(request), ImportModel)
    path = _below(parts.calls.settings.data_dir, wanted.manifest)
    return json_answer(_import_view(await adopt(parts.calls, path)), 201)


@router.get(
    "/v1/imports/{import_id}",
    tags=["bulk"],
    responses=MISSING | {200: answer(ImportViewModel)},
    openapi_extra=OF_SHARD,
)
async def get_import(import_id: ImportPath, parts: PartsOf) -> Response:
    """How far an import is."""
    return json_answer(_import_view(parts.calls.part(Imports).find(import_id)))


@router.get(
    "/v1/imports/{import_id}/duplicates",
    tags=["bulk"],
    responses=MISSING | {200: answer(DuplicatesModel)},
    openapi_extra=OF_SHARD,
)
async def list_import_duplicates(
    import_id: ImportPath,
    parts: PartsOf,
    limit: Annotated[int, Query(ge=1, le=DUPLICATES_PAGE_MAX)] = 1000,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,10}$")] = None,
) -> Response:
    """Rows of an adopted import that were left out, and the messages that hold their keys."""
    rows = parts.calls.part(Imports).state(import_id).record.left_out()
    first = int(np.searchsorted(rows["row"], int(cursor or 0)))
    page = rows[first : first + limit].tolist()
    rest = rows["row"][first + limit : first + limit + 1].tolist()
    encode_id = parts.calls.encode_id
    duplicates = [DuplicateModel(row, encode_id(due_ms, seq)) for row, seq, due_ms in page]
    return json_answer(DuplicatesModel(duplicates, str(rest[0]) if rest else None))


@archives_router.get(
    "/v1/archives",
    tags=["bulk"],
    responses=INVALID | {200: answer(ArchivesModel)},
    openapi_extra=OF_SHARD,
)
async def list_archives(
    parts: PartsOf,
    state: Literal["waiting", "archived", "all"] = "waiting",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: Annotated[str | None, Query(pattern=f"^{HOUR_PATTERN}$")] = None,
    places: PlacesHeader = None,
) -> Response:
    """Settled hours that are kept, the oldest first: those that wait to be archived, those that
    were, or all. Where there are shards, those of all of them, or of one (`shard`)."""
    from_hour = 0 if cursor is None else _hour(cursor, "/cursor")
    found = [
        kept
        for kept in await _kept_hours(parts.calls)
        if kept.hour >= from_hour and state in ("all", _archive_state(kept))
    ]
    if places is not None:
        items = (encode(_archive_view(one)) for one in found[:limit])
        following = (found[limit].hour,) if len(found) > limit else None
        at = ((one.hour,) for one in found[:limit])
        return shard_page(items, at, following, limit)
    return json_answer(
        ArchivesModel(
            archive=parts.calls.settings.archive,
            hours=[_archive_view(kept) for kept in found[:limit]],
            cursor=hour_name(found[limit].hour) if len(found) > limit else None,
        )
    )


@archives_router.put(
    "/v1/archives/{hour}",
    tags=["bulk"],
    responses=CONFLICT | LOGGED | {200: answer(ArchiveConfirmedModel)},
    openapi_extra=OF_SHARD | json_body(ArchiveModel),
)
async def confirm_archive(hour: HourPath, request: Request, parts: PartsOf) -> Response:
    """An hour was archived: with the setting `archive` the server may delete it from now on,
    after its retention. Refused if the archive does not cover all that the hour holds now. It is
    durable when this answers; the same again is answered the same."""
    wanted = read(await json_of(request), ArchiveModel)
    archived = Archived(**msgspec.structs.asdict(wanted), archived_ms=parts.calls.clock())
    number = _hour(hour, "")
    parts.calls.admit(0)
    await parts.calls.on_filer(confirming(number, archived))
    at = format_time(archived.archived_ms)
    return json_answer(ArchiveConfirmedModel(hour, "archived", at))


async def adopt(calls: Calls, path: str) -> Import:
    """Adopt a staged import; on return it is durable. See Imports.adopt for the errors.

    Besides: NotFoundError, StagingError, ConflictError, TooLargeError."""
    _refuse_in_a_cluster(calls.settings)
    future: asyncio.Future[Import] = asyncio.get_running_loop().create_future()
    calls.part(Imports).adopt(path, answering(future))
    return await future


def _refuse_in_a_cluster(settings: Settings) -> None:
    """Raises ConflictError where there are replicas, which would not have the staged files."""
    if settings.cluster is not None:
        raise ConflictError(
            "a cluster takes no bulk loads yet, since only one of its nodes has their files: "
            "publish in batches, or as a stream"
        )


async def _kept_hours(calls: Calls) -> list[ArchivableHour]:
    """Retired hours that are kept, in order, as of the last checkpoint."""
    # There may be years of them.
    return await asyncio.to_thread(lambda: list(kept_hours(calls.catalog, calls.files)))


def _below(data_dir: FilePath, path: str) -> str:
    """A path that a client gave, from the data directory on. Raises InputError."""
    if not FilePath(path).is_absolute():
        return path
    try:
        return FilePath(path).relative_to(data_dir.resolve()).as_posix()
    except ValueError:
        raise InputError(
            "the manifest is not in the server's data directory", "/manifest"
        ) from None


def _hour(text: str, pointer: str) -> int:
    """The number of an hour. Raises InputError."""
    hour = parse_hour(text)
    if hour is None:
        raise InputError(f"{text!r} is not an hour such as 2026-11-20T15", pointer)
    return hour


def _archive_state(kept: ArchivableHour) -> Literal["waiting", "archived"]:
    return "waiting" if kept.archived is None else "archived"


def _archive_view(kept: ArchivableHour) -> ArchiveViewModel:
    archived = kept.archived
    return ArchiveViewModel(
        hour=hour_name(kept.hour),
        state=_archive_state(kept),
        retired_at=format_time(kept.retired_ms),
        count=kept.count,
        **kept.extent._asdict(),
        archived_at=None if archived is None else format_time(archived.archived_ms),
        checksum=None if archived is None else archived.checksum,
        location=None if archived is None else archived.location,
    )


def _import_view(found: Import) -> ImportViewModel:
    return ImportViewModel(
        id=found.id,
        state=found.stage,
        count=found.count,
        done=found.done,
        accepted=found.count - found.duplicates if found.first_seq else 0,
        duplicates=found.duplicates,
        conflicts=found.conflicts,
        first_seq=found.first_seq,
    )
