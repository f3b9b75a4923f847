"""Imports and archives: each shard has its own, and `shard=` or the manifest says which is meant.

Cost: 10 µs. Threads: belongs to the event loop.
"""

from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Final

import msgspec

from delayserver.api.documents import encode
from delayserver.errors import InputError
from delayserver.parts.part import Route
from delayserver.security.tokens import Action
from delayserver.shards.all_shards import MISSING, AllShards, query, read_row, with_body
from delayserver.shards.merged_lists import MergedLists
from delayserver.shards.pages import PagedList, Place
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.wire.reading import UNREADABLE
from storage.buckets import hour_name, parse_hour
from storage.shards import shard_directory

_HOUR_MAX: Final = int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) // 3600
"""The last one that has a name."""


def _hour(text: str) -> Place | None:
    hour = parse_hour(text)
    return None if hour is None else (hour,)


_ARCHIVES: Final = PagedList("hours", (_HOUR_MAX,), lambda place: hour_name(place[0]), _hour)


def import_routes(every: AllShards, lists: MergedLists) -> list[Route]:
    """The routes of imports."""
    imports = ImportRoutes(every, lists)
    return [
        ("POST", r"/v1/imports", imports.adopt),
        ("PUT", r"/v1/imports/[^/]+", imports.of_shard),
        ("GET", r"/v1/imports/[^/]+(?:/duplicates)?", imports.one),
    ]


def archive_routes(every: AllShards, lists: MergedLists) -> list[Route]:
    """The routes of archives."""
    imports = ImportRoutes(every, lists)
    return [
        ("GET", r"/v1/archives", imports.archives),
        ("PUT", r"/v1/archives/[^/]+", imports.of_shard),
    ]


class ImportRoutes:
    """Each method returns the shard that a call is for, or the answer. All raise InputError, and
    AccessError before that."""

    def __init__(self, all_shards: AllShards, lists: MergedLists) -> None:
        self._all = all_shards
        self._lists = lists

    def of_shard(self, call: PeerCall) -> int:
        """For one that says which."""
        shard = self._named_shard(call)
        if shard is None:
            raise self._which_shard()
        return shard

    def one(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """An import."""
        shard = self._named_shard(call)
        return self._import_of_any(call) if shard is None else shard

    async def _import_of_any(self, call: PeerCall) -> PeerAnswer:
        """The one that has it. Each shard gives its imports their ids."""
        answers = await self._all.ask_all(call)
        found = [one for one in answers.values() if one.status == 200]
        if len(found) > 1:
            raise self._which_shard()
        refused_by = self._all.refusal(answers, (MISSING,))
        return found[0] if refused_by is None else refused_by

    def adopt(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """`shard=`, or the shard whose directory the manifest is in, from the root or from the
        directory of all shards on."""
        shard = self._named_shard(call)
        try:
            body = read_row(call.body)
            manifest = msgspec.json.decode(body["manifest"], type=str)
        except (*UNREADABLE, KeyError):
            return self._all.own
        parts = PurePosixPath(manifest).parts
        # DIR/shard-0001/imports/name.manifest
        directories = {shard_directory(n): n for n in range(self._all.count)}
        within = directories.get(parts[-3]) if len(parts) > 2 else None
        if within is None and shard is None:
            raise InputError(
                "the manifest is in no shard's directory; say which one it is for, with shard=",
                "/manifest",
            )
        if within is not None and shard not in (within, None):
            raise InputError(f"the manifest is not one of shard {shard}", "/manifest")
        to = shard if within is None else within
        assert to is not None
        if within is None or len(parts) > 3:
            return to
        body["manifest"] = msgspec.Raw(encode("/".join(parts[1:])))
        return self._all.forward(to, with_body(call, encode(body)), call)

    def archives(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """Hours that are retired: of one shard, or of all."""
        shard = self._named_shard(call)
        if shard is not None:
            return shard
        first = {"archive": self._lists.settings.archive}
        return self._lists.page(call, _ARCHIVES, first=first, shows_shard=True)

    def _named_shard(self, call: PeerCall) -> int | None:
        """The shard that `shard=` names."""
        if call.caller is not None:
            call.caller.require((Action.ADMIN,))
        text = query(call).get("shard")
        if text is None:
            return None
        shard = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        if not 0 <= shard < self._all.count:
            raise self._which_shard()
        return shard

    def _which_shard(self) -> InputError:
        last = self._all.count - 1
        return InputError(f"say which shard it is for: shard=0 to shard={last}", "/query/shard")
