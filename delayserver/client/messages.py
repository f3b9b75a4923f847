"""Messages: published in one step, looked up, moved, replaced, replayed and cancelled.

Cancels are sent in batches, as publishes are. Every other call is one request to the owner of the
message's shard.

Cost: one request per call. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Unpack
from urllib.parse import urlencode

import msgspec

from delayserver.client.batches import (
    Cancelling,
    batch_path,
    message_path,
    published_in_parts,
    read_published,
)
from delayserver.client.cutting import decoded_message
from delayserver.client.producer import Ack, Publisher
from delayserver.client.retries import within
from delayserver.client.transport import decoded, path_of
from delayserver.client.values import (
    Attempts,
    Delay,
    DeliverAt,
    Draft,
    Moved,
    Published,
    ReplaceOptions,
    Replayed,
    Stored,
    time,
)
from delayserver.client.writing import (
    content_to_send,
    draft_to_send,
    due,
    encode,
    encode_message,
    is_filed,
    options_to_send,
    text_to_send,
)
from delayserver.wire.messages import CancelKeyBody


class _Id(msgspec.Struct):
    id: str


class AsyncClientMessages(Publisher):
    """The messages of a server.

    await client.messages.publish("order.unpaid", {"order": 1001}, delay="30m", key="1001")
    await client.messages.cancel(subject="order.unpaid", key="1001")"""

    async def publish_all(
        self,
        messages: Iterable[Draft],
        *,
        ack: Ack = "durable",
        atomic: bool = False,
        timeout_s: float | None = None,
    ) -> list[Published]:
        """Publish messages in one step: all of them, or none, in each shard that has some of them.
        At most 10,000, in one request for each shard. A server alone is one shard.

        Messages belong to shards by subject and key; those without a key stay together, and go
        along with most of the others. With `atomic` a batch that needs more than one shard is
        refused before anything is done.

        Raises as `publish`, but an InvalidError also where a key stands for other content: its
        `errors` name the bad ones by their index (`/3/key`). PartlyPublishedError where some shards
        have published their part and others have not."""
        documents, keys = [draft_to_send(draft) for draft in messages], list[str | None]()
        self._settle()
        if atomic and self._asks_for_map:
            # The generated keys decide whether the messages belong together.
            told = self._owners.is_told.wait()
            await (told if timeout_s is None else within(timeout_s, told))
        shard = self._owners.together([(one["subject"], one.get("key")) for one in documents])
        for document in documents:
            keys.append(document.get("key"))
            if keys[-1] is None and "group" not in document and self._generates_keys:
                keys[-1] = ""
                document["key"] = self._generated_key(document["subject"], shard)
        # A body that cannot be written is refused before anything is sent.
        bodies = [msgspec.Raw(encode_message(document)) for document in documents]
        parts = self._owners.parts([(one["subject"], one.get("key")) for one in documents])
        if len(parts) <= 1 or atomic:
            # Any of several shards will do: it refuses the batch, and says why.
            parts = {next(iter(parts), None): list(range(len(keys)))}
        path = batch_path(is_filed=is_filed(ack), is_atomic=atomic)

        async def publish(shard: int | None, which: Sequence[int]) -> list[Published]:
            own_keys = [keys[index] for index in which]
            answer = await self._call(
                "POST",
                path,
                [bodies[index] for index in which],
                shard=shard,
                repeatable=None not in own_keys,
                timeout_s=timeout_s,
            )
            return read_published(answer, own_keys, path)

        return await published_in_parts(publish, parts)

    async def cancel(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Cancel a message, by its id or by subject and key; when this returns, it never fires.

        `if_match`: only if that is its version (`Stored.version`). Raises ConflictError, whose
        `state` is that of the message: delivering, delivered or dead; NotFoundError; ChangedError
        with `if_match`; and as `publish`."""
        if timeout_s is not None:
            again = self.cancel(message_id, subject=subject, key=key, if_match=if_match)
            return await within(timeout_s, again)
        if if_match is not None:
            path = message_path(message_id, subject, key)
            shard = self._shard_of(message_id, subject, key)
            await self._call("DELETE", path, shard=shard, if_match=if_match)
            return None
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._settle_in(loop)
        if message_id is None and subject is not None and key is not None:
            data = encode(CancelKeyBody(text_to_send("subject", subject), text_to_send("key", key)))
        else:
            data = b"" if message_id is None else encode(text_to_send("message_id", message_id))
            if message_id is None or subject is not None or key is not None:
                message_path(message_id, subject, key)  # which names the mistake
        lane = self._shard_of(message_id, subject, key)
        batcher = self._cancels
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[None] = loop.create_future()
        batcher.put(Cancelling(data, future, message_id, subject, key, lane))
        return await future

    async def get(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Stored:
        """Look a message up, by its id or by subject and key. Raises NotFoundError."""
        path = message_path(message_id, subject, key)
        shard = self._shard_of(message_id, subject, key)
        answer = await self._call("GET", path, shard=shard, timeout_s=timeout_s)
        return msgspec.structs.replace(decoded_message(answer.body, Stored), version=answer.version)

    async def attempts(self, message_id: str, *, timeout_s: float | None = None) -> Attempts:
        """How each attempt to deliver a message went. Raises NotFoundError."""
        path = path_of("messages", message_id, "attempts")
        shard = self._shard_of(message_id)
        answer = await self._call("GET", path, shard=shard, timeout_s=timeout_s)
        return decoded(answer.body, Attempts)

    async def replay(
        self,
        message_id: str,
        *,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> Replayed:
        """Have a message that is settled delivered again, to all that had it, or to `subscription`;
        with the same id, and the header `delay-replay`.

        A lost answer is an UnansweredError: asked again, it may deliver it twice. Raises
        ConflictError, whose `state` is that of the message; NotFoundError."""
        path = path_of("messages", message_id, "replay")
        if subscription is not None:
            path += "?" + urlencode({"subscription": subscription})
        shard = self._shard_of(message_id)
        answer = await self._call("POST", path, shard=shard, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, Replayed)

    def pending(
        self,
        subject: str,
        *,
        since: DeliverAt | None = None,
        until: DeliverAt | None = None,
        page: int = 1000,
    ) -> AsyncIterator[Stored]:
        """Messages of a subject that wait, in due order: due from `since` on, and before `until`.

        One request for each `page` of them."""
        path = path_of("subjects", subject, "messages")
        begin = None if since is None else time(since)
        end = None if until is None else time(until)
        return self._pages(path, "messages", Stored, page, **{"from": begin, "to": end})

    async def move(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> Moved:
        """Give a message a new due time; `delay` and `deliver_at` as for `publish`. Raises as
        `cancel`, and InvalidError."""
        path = message_path(message_id, subject, key)
        document = due(delay, deliver_at)
        shard = self._shard_of(message_id, subject, key)
        answer = await self._call(
            "PATCH", path, document, shard=shard, if_match=if_match, timeout_s=timeout_s
        )
        return msgspec.structs.replace(decoded(answer.body, Moved), version=answer.version)

    async def replace(
        self,
        subject: str,
        key: str,
        body: Any = None,
        *,
        if_match: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> Published:
        """Publish in place of the message that waits under the key: a timer that each call pushes
        back. The arguments are those of `publish`; `debounce` takes the place of `delay`.

        Raises as `publish`; ChangedError with `if_match`. After a lost answer it is sent again only
        where a message still waits under the key, so that it never fires twice; else, an
        UnansweredError leaves it to the caller."""
        path = path_of("subjects", subject, "keys", key)
        document = content_to_send(body, None) | options_to_send(ReplaceOptions, options)
        shard = self._shard_of(None, subject, key)
        if if_match is None:
            answer = await self._replace(path, document, timeout_s, shard=shard)
        else:
            answer = await self._call(
                "PUT", path, document, shard=shard, if_match=if_match, timeout_s=timeout_s
            )
        return Published(decoded(answer.body, _Id).id)
