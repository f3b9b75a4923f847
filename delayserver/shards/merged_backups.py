"""Backups of a server of several shards: each shard makes its part, under one name.

Cost: a call to each shard. Threads: belongs to the event loop.
"""

from typing import Final

import msgspec

from delayserver.api.documents import encode
from delayserver.api.hot.answers import JSON
from delayserver.shards.all_shards import MISSING, AllShards, json_answer, made_answer
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.sums import add_backup, add_backups
from delayserver.wire.bulk import BackupDocument, BackupListDocument

_ACCEPTED: Final = 202
_DELETED: Final = 204


class _WantedBackup(msgspec.Struct):
    verify: bool = True


_read_backup = msgspec.json.Decoder(BackupDocument).decode
_read_backups = msgspec.json.Decoder(BackupListDocument).decode
_read_wanted = msgspec.json.Decoder(_WantedBackup).decode


class MergedBackups:
    """See the top of this module."""

    def __init__(self, all_shards: AllShards) -> None:
        self._all = all_shards

    async def begin(self, call: PeerCall) -> PeerAnswer:
        """The own shard gives the name; if another refuses, nothing is left of it."""
        own = await self._all.ask_one(self._all.own, call)
        if own.status != _ACCEPTED:
            return own
        begun = _read_backup(own.body)
        verify = _read_wanted(call.body).verify if call.body else True
        body = encode({"name": begun.name, "verify": verify})
        wanted = call._replace(headers=((b"content-type", JSON),), body=body)
        answers = await self._all.ask(dict.fromkeys(self._all.others(), wanted))
        taken = [shard for shard, one in answers.items() if one.status == _ACCEPTED]
        if len(taken) < len(answers):
            # The backup that another has under that name already stays.
            given_up = PeerCall("DELETE", f"/v1/backups/{begun.name}", caller=call.caller)
            await self._all.ask(dict.fromkeys((self._all.own, *taken), given_up))
            return next(one for one in answers.values() if one.status != _ACCEPTED)
        parts = {self._all.own: begun}
        parts |= {shard: _read_backup(one.body) for shard, one in answers.items()}
        location = [one for one in own.headers if one[0] == b"location"]
        return made_answer(
            _ACCEPTED, encode(add_backup(dict(sorted(parts.items())))), JSON, location
        )

    async def page(self, call: PeerCall) -> PeerAnswer:
        """All that there are."""
        answers = await self._all.ask_all(call)
        refused_by = self._all.refusal(answers)
        if refused_by is not None:
            return refused_by
        lists = {shard: _read_backups(one.body).backups for shard, one in sorted(answers.items())}
        return json_answer(encode(BackupListDocument(add_backups(lists))))

    async def one(self, call: PeerCall) -> PeerAnswer:
        """One of them; it has failed if a part is missing."""
        answers = await self._all.ask_all(call)
        refused_by = self._all.refusal(answers, (MISSING,))
        if refused_by is not None:
            return refused_by
        parts = {
            shard: _read_backup(one.body) if one.status == 200 else None
            for shard, one in sorted(answers.items())
        }
        return json_answer(encode(add_backup(parts)))

    async def delete(self, call: PeerCall) -> PeerAnswer:
        """Delete all parts."""
        answers = await self._all.ask_all(call)
        refusals = [one for one in answers.values() if one.status not in (_DELETED, MISSING)]
        if refusals:
            return refusals[0]
        return min(answers.values(), key=lambda one: one.status)
