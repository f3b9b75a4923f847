"""Backups: consistent copies of the server's data, in the directory that its settings name.

Where there are shards, each makes its part (`delayserver.shards.router` asks all of them).

Cost: about 100 µs per call, and the reading of manifests in a thread. Threads: belongs to the event
loop.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from delayserver.api.documents import backup_document
from delayserver.api.rest.common import CONFLICT, LOGGED, STORED, PartsOf, json_answer, json_of
from delayserver.api.rest.openapi import answer, json_body
from delayserver.wire.bulk import BACKUP_NAME, BackupDocument, BackupListDocument, BackupModel
from delayserver.wire.reading import read

BackupPath = Annotated[str, Path(pattern=f"^{BACKUP_NAME}$")]
BACKUPS_PATH = "/v1/backups"

router = APIRouter()


@router.post(
    BACKUPS_PATH,
    tags=["operations"],
    status_code=202,
    responses=CONFLICT | LOGGED | STORED | {202: answer(BackupDocument)},
    openapi_extra=json_body(BackupModel, required=False),
)
async def begin_backup(request: Request, parts: PartsOf) -> Response:
    """Begin a backup: everything that is answered by now is in it. It is made while the server goes
    on; `GET` says how far it is. One at a time; 409 also where the server has no directory for
    backups, and in a cluster."""
    wanted = read(await json_of(request, b"{}"), BackupModel)
    begun = await parts.calls.backups.begin(wanted.name, is_verified=wanted.verify)
    answered = json_answer(backup_document(begun), 202)
    answered.headers["location"] = f"{BACKUPS_PATH}/{begun.name}"
    return answered


@router.get(
    BACKUPS_PATH,
    tags=["operations"],
    responses=CONFLICT | STORED | {200: answer(BackupListDocument)},
)
async def list_backups(parts: PartsOf) -> Response:
    """All backups that there are, the oldest first, and the one that is being made or has
    failed."""
    views = await parts.calls.backups.list()
    return json_answer(BackupListDocument([backup_document(one) for one in views]))


@router.get(
    f"{BACKUPS_PATH}/{{name}}",
    tags=["operations"],
    responses=CONFLICT | STORED | {200: answer(BackupDocument)},
)
async def get_backup(name: BackupPath, parts: PartsOf) -> Response:
    """A backup, or how far it is."""
    return json_answer(backup_document(await parts.calls.backups.get(name)))


@router.delete(
    f"{BACKUPS_PATH}/{{name}}",
    tags=["operations"],
    status_code=204,
    responses=CONFLICT | STORED,
    response_class=Response,
)
async def delete_backup(name: BackupPath, parts: PartsOf) -> Response:
    """Delete a backup; one that is being made is given up. No other is touched by that."""
    await parts.calls.backups.delete(name)
    return Response(status_code=204)
