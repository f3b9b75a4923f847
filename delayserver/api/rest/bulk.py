"""Bulk: imports of what a bulk load has staged, and archives of hours that are settled.

The rows themselves do not go through HTTP: a bulk load writes files below the data directory, and
an archive is made of the hours' files.

Where there are shards, each has imports and archives of its own: a call says with `shard` which one
it is for (`delayserver.shards.router` sends it there; a server alone has no use for it).

Cost: about 100 µs per call; the list of archives reads all retired hours. Threads: belongs to the
event loop.
"""

from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Path, Query, Response

from delayserver.api.rest import models
from delayserver.api.rest.common import (
    CONFLICT,
    INVALID,
    LOGGED,
    MISSING,
    PAGE_MAX,
    PartsOf,
    PlacesHeader,
    shard_page,
)
from delayserver.decisions.imports import Import
from delayserver.errors import InputError, NotFoundError
from delayserver.records.tables import Archived
from delayserver.schedule.archives import RetiredHour
from delayserver.times import format_time
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
"""What the router reads, and no handler."""

router = APIRouter()


@router.put(
    "/v1/imports/{import_id}",
    tags=["bulk"],
    responses=INVALID | LOGGED,
    openapi_extra=OF_SHARD,
)
async def begin_import(
    import_id: ImportPath, wanted: models.ImportSubjectsModel, parts: PartsOf
) -> models.ImportBegunModel:
    """Begin a bulk load: the numbers of its subjects, and whether it was adopted before."""
    parts.calls.check_imports()
    try:
        state = str(parts.calls.find_import(import_id).stage)
    except NotFoundError:
        state = "staging"
    numbers, group = parts.calls.begin_import(wanted.subjects)
    await parts.calls.durable(group)
    return models.ImportBegunModel(
        id=import_id,
        state=state,
        subjects=numbers,
        now=format_time(parts.calls.clock()),
        delay_max_ms=parts.calls.settings.delay_max_ms,
        body_max_bytes=parts.calls.settings.body_max_bytes,
        directory=parts.calls.directory,
    )


@router.post(
    "/v1/imports",
    tags=["bulk"],
    status_code=201,
    responses=CONFLICT | LOGGED,
    openapi_extra=OF_SHARD,
)
async def adopt_import(wanted: models.ImportModel, parts: PartsOf) -> models.ImportViewModel:
    """Adopt what a bulk load has staged, all or nothing. It is durable when this answers; the
    same again is answered the same."""
    path = _below(parts.calls.settings.data_dir, wanted.manifest)
    return _import_view(await parts.calls.adopt(path))


@router.get("/v1/imports/{import_id}", tags=["bulk"], responses=MISSING, openapi_extra=OF_SHARD)
async def get_import(import_id: ImportPath, parts: PartsOf) -> models.ImportViewModel:
    """How far an import is."""
    return _import_view(parts.calls.find_import(import_id))


@router.get(
    "/v1/imports/{import_id}/duplicates",
    tags=["bulk"],
    responses=MISSING,
    openapi_extra=OF_SHARD,
)
async def list_import_duplicates(
    import_id: ImportPath,
    parts: PartsOf,
    limit: Annotated[int, Query(ge=1, le=DUPLICATES_PAGE_MAX)] = 1000,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,10}$")] = None,
) -> models.DuplicatesModel:
    """Rows of an adopted import that were left out, and the messages that hold their keys."""
    rows = parts.calls.import_state(import_id).record.left_out()
    first = int(np.searchsorted(rows["row"], int(cursor or 0)))
    page = rows[first : first + limit].tolist()
    rest = rows["row"][first + limit : first + limit + 1].tolist()
    encode_id = parts.calls.encode_id
    return models.DuplicatesModel(
        duplicates=[
            models.DuplicateModel(row=row, id=encode_id(due_ms, seq)) for row, seq, due_ms in page
        ],
        cursor=str(rest[0]) if rest else None,
    )


@router.get(
    "/v1/archives",
    tags=["bulk"],
    responses=INVALID,
    openapi_extra=OF_SHARD,
    response_model=models.ArchivesModel,
    response_model_exclude_unset=True,  # the shard
)
async def list_archives(
    parts: PartsOf,
    state: Literal["waiting", "archived", "all"] = "waiting",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: Annotated[str | None, Query(pattern=f"^{HOUR_PATTERN}$")] = None,
    places: PlacesHeader = None,
) -> models.ArchivesModel | Response:
    """Settled hours that are kept, the oldest first: those that wait to be archived, those that
    were, or all. Where there are shards, those of all of them, or of one (`shard`)."""
    from_hour = 0 if cursor is None else _hour(cursor, "/cursor")
    found = [
        retired
        for retired in await parts.calls.retired_hours()
        if retired.hour >= from_hour and state in ("all", _archive_state(retired))
    ]
    if places is not None:
        items = (_archive_view(one).model_dump_json(exclude_unset=True) for one in found[:limit])
        following = (found[limit].hour,) if len(found) > limit else None
        at = ((one.hour,) for one in found[:limit])
        return shard_page(map(str.encode, items), at, following, limit)
    return models.ArchivesModel(
        archive=parts.calls.settings.archive,
        hours=[_archive_view(retired) for retired in found[:limit]],
        cursor=hour_name(found[limit].hour) if len(found) > limit else None,
    )


@router.put(
    "/v1/archives/{hour}",
    tags=["bulk"],
    responses=CONFLICT | LOGGED,
    openapi_extra=OF_SHARD,
)
async def confirm_archive(
    hour: HourPath, archive: models.ArchiveModel, parts: PartsOf
) -> models.ArchiveConfirmedModel:
    """An hour was archived: with the setting `archive` the server may delete it from now on,
    after its retention. Refused if the archive does not cover what the hour holds now. It is
    durable when this answers; the same again is answered the same."""
    archived = Archived(**archive.model_dump(), archived_ms=parts.calls.clock())
    await parts.calls.confirm_archive(_hour(hour, ""), archived)
    return models.ArchiveConfirmedModel(
        hour=hour, state="archived", archived_at=format_time(archived.archived_ms)
    )


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


def _archive_state(retired: RetiredHour) -> Literal["waiting", "archived"]:
    return "waiting" if retired.archived is None else "archived"


def _archive_view(retired: RetiredHour) -> models.ArchiveViewModel:
    archived = retired.archived
    return models.ArchiveViewModel(
        hour=hour_name(retired.hour),
        state=_archive_state(retired),
        retired_at=format_time(retired.retired_ms),
        count=retired.count,
        **retired.extent._asdict(),
        archived_at=archived and format_time(archived.archived_ms),
        checksum=archived and archived.checksum,
        location=archived and archived.location,
    )


def _import_view(found: Import) -> models.ImportViewModel:
    return models.ImportViewModel(
        id=found.id,
        state=found.stage,
        count=found.count,
        done=found.done,
        accepted=found.count - found.duplicates if found.first_seq else 0,
        duplicates=found.duplicates,
        conflicts=found.conflicts,
        first_seq=found.first_seq,
    )
