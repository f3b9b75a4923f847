"""Registers imports and archives with the core. Cost: none. Threads: immutable values.

The core itself files an import (`Replay.file_import`): its record stands for rows that no record of
the log holds. So the record and its table (`delayserver.schedule.expansion`) stay there, and so do
the keys of an import that is on its way.
"""

from typing import TYPE_CHECKING, Any, Final

from delayserver.api.scopes import ADMIN
from delayserver.config import Settings
from delayserver.parts.imports.archives import Archives, WaitingHours
from delayserver.parts.imports.imports import Imports
from delayserver.parts.imports.records import check_archived
from delayserver.parts.imports.staged import StagedImports
from delayserver.parts.part import Feature, Route
from delayserver.schedule.expansion import check_import
from storage.catalog import Table

if TYPE_CHECKING:
    from fastapi import APIRouter

    from delayserver.server.calls import Calls
    from delayserver.server.shard import Shard
    from delayserver.server.threads import Worker
    from delayserver.shards.all_shards import AllShards
    from delayserver.shards.merged_lists import MergedLists


def _work(imports: Imports, shard: "Shard") -> "Worker[Any]":
    from delayserver.parts.imports.importer import Importer
    from delayserver.parts.imports.worker import ImporterThread

    importer = Importer(shard.files, shard.catalog, shard.store.identity.stamp)
    thread = ImporterThread(importer, shard.post, imports.on_verified, shard.on_fatal)
    imports.connect(thread.put)
    return thread


def _import_router() -> "APIRouter":
    from delayserver.parts.imports.rest import router

    return router


def _archive_router() -> "APIRouter":
    from delayserver.parts.imports.rest import archives_router

    return archives_router


def _import_routes(every: "AllShards", lists: "MergedLists") -> list[Route]:
    from delayserver.parts.imports.shard_routes import import_routes

    return import_routes(every, lists)


def _archive_routes(every: "AllShards", lists: "MergedLists") -> list[Route]:
    from delayserver.parts.imports.shard_routes import archive_routes

    return archive_routes(every, lists)


def _keep(settings: Settings, *filing: Any) -> Archives:
    return Archives(*filing, must=settings.archive)


async def _look(waiting: WaitingHours, calls: "Calls") -> None:
    await waiting.look(calls.catalog, calls.files)


IMPORTS_PART: Final = Feature(
    name="import",
    decide=Imports,
    checks={Table.IMPORTS: check_import},
    holds=lambda imports: imports.is_deciding,
    work=_work,
    inspect=StagedImports,
    routes=_import_router,
    rules={
        ("PUT", "/v1/imports/{import_id}"): ADMIN,
        ("POST", "/v1/imports"): ADMIN,
        ("GET", "/v1/imports/{import_id}"): ADMIN,
        ("GET", "/v1/imports/{import_id}/duplicates"): ADMIN,
    },
    shard_routes=_import_routes,
    examples={"ImportModel": [{"manifest": "imports/coupons-1.manifest"}]},
)

ARCHIVES_PART: Final = Feature(
    name="archive",
    decide=WaitingHours,
    checks={Table.ARCHIVES: check_archived},
    keep=_keep,
    look=_look,
    stats=WaitingHours.stats,
    routes=_archive_router,
    rules={("GET", "/v1/archives"): ADMIN, ("PUT", "/v1/archives/{hour}"): ADMIN},
    shard_routes=_archive_routes,
    examples={
        "ArchiveModel": [
            {
                "schedule_bytes": 48128,
                "dispatch_bytes": 4160,
                "last_seq": 1100,
                "count": 100,
                "checksum": "5a0c7e9fd1c2b3a4",
                "location": "s3a://archive/delays",
            }
        ]
    },
)
