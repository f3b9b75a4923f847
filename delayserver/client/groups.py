"""The small groups of calls: dead letters, events, heartbeats, imports, tokens, and the state of a
server. `AsyncClient` offers them.

Answers are the structs of `delayserver.wire`, which the server itself encodes.

Cost: one request per call, one per page of a list. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlencode

from delayserver.client.calling import RetryingClient
from delayserver.client.cutting import decoded_message
from delayserver.client.messages import AsyncClientMessages
from delayserver.client.transport import decoded, path_of
from delayserver.client.values import DeadLetter, Delay, EventResult, Heartbeat, duration
from delayserver.client.writing import content_to_send
from delayserver.wire.bulk import (
    ArchiveConfirmedModel,
    ArchiveModel,
    ArchiveViewModel,
    DuplicateModel,
    ImportBegunModel,
    ImportViewModel,
)
from delayserver.wire.operations import (
    ClusterDocument,
    ForecastDocument,
    OwnTokenDocument,
    StatsDocument,
    SubjectDocument,
    TokenDocument,
)
from delayserver.wire.subscriptions import (
    DeadLetterCountDocument,
    RedrivenModel,
)

T = TypeVar("T")


class AsyncClientDeadLetters:
    """Messages that the server gave up, by the name of their subscription."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    def list(self, name: str, *, page: int = 100) -> AsyncIterator[DeadLetter]:
        """Dead letters of a subscription, in the order in which their last attempts were scheduled.
        The name `_to` lists messages that named their own URLs. Raises NotFoundError.

        One request for each `page` of them."""

        return self._client._pages(_letters(name), "dead_letters", DeadLetter, page)

    def counts(self, *, page: int = 100) -> AsyncIterator[DeadLetterCountDocument]:
        """Subscriptions that have dead letters, with how many, as of the last checkpoint."""

        return self._client._pages(
            path_of("dead-letters"), "subscriptions", DeadLetterCountDocument, page
        )

    async def redrive(
        self, name: str, ids: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Deliver dead letters again, all or those with these message ids. Returns their number.

        UnansweredError after a lost answer: a second request would also redrive messages that died
        in between."""
        path, wanted = _letters(name, "redrive"), {} if ids is None else {"ids": ids}
        answer = await self._client._call(
            "POST", path, wanted, repeatable=False, timeout_s=timeout_s
        )
        return decoded(answer.body, RedrivenModel).redriven

    async def discard(self, name: str, message_id: str, *, timeout_s: float | None = None) -> None:
        """Delete a dead letter. Raises NotFoundError."""
        await self._client._delete(_letters(name, message_id), timeout_s)


def _letters(name: str, *more: str) -> str:
    return path_of("subscriptions", name, "dead-letters", *more)


class AsyncClientEvents:
    """Events, each of which completes the messages that watch its key."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    async def send(self, key: str, *, timeout_s: float | None = None) -> EventResult:
        """Complete every message that watches `key`. Durable when this returns. After a lost answer
        the client asks again, and returns the result of the last request."""
        path = path_of("events", key)
        return await _read(self._client, EventResult, "POST", path, timeout_s=timeout_s)


class AsyncClientHeartbeats:
    """Heartbeats: each publishes a message unless it is renewed in time."""

    def __init__(self, messages: AsyncClientMessages) -> None:
        self._messages = messages

    async def put(
        self,
        key: str,
        *,
        timeout: Delay,
        subject: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Heartbeat:
        """Publish a message unless this is called again within `timeout`: a timedelta, text such as
        "10s", or whole milliseconds. Raises as `messages.publish`."""
        content = content_to_send(body, headers)
        document = {**content, "subject": subject, "timeout": duration(timeout)}
        path, shard = self._place(key)
        answer = await self._messages._call("PUT", path, document, shard=shard, timeout_s=timeout_s)
        return decoded_message(answer.body, Heartbeat)

    async def get(self, key: str, *, timeout_s: float | None = None) -> Heartbeat:
        """A heartbeat, and when it expires. Raises NotFoundError."""
        path, shard = self._place(key)
        answer = await self._messages._call("GET", path, shard=shard, timeout_s=timeout_s)
        return decoded_message(answer.body, Heartbeat)

    async def delete(self, key: str, *, timeout_s: float | None = None) -> None:
        """End a heartbeat: when this returns, it never publishes. Raises NotFoundError."""
        path, shard = self._place(key)
        await self._messages._delete(path, timeout_s, shard=shard)

    def _place(self, key: str) -> tuple[str, int | None]:
        """The path of a heartbeat, and its shard."""
        self._messages._settle()
        return path_of("heartbeats", key), self._messages._owners.of_heartbeat(key)


class AsyncClientImports:
    """Bulk loads and archives; they need a token with the scope `admin`.

    `shard` names the shard that has the import or the hour, where a server has several."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    async def begin(
        self,
        import_id: str,
        subjects: Sequence[str],
        *,
        shard: int | None = None,
        timeout_s: float | None = None,
    ) -> ImportBegunModel:
        """Begin a bulk load. The answer has the number of each subject for the staged rows. Raises
        InvalidError."""
        return await _read(
            self._client,
            ImportBegunModel,
            "PUT",
            _of_shard(path_of("imports", import_id), shard),
            {"subjects": list(subjects)},
            timeout_s=timeout_s,
        )

    async def adopt(self, manifest: str, *, timeout_s: float | None = None) -> ImportViewModel:
        """Adopt the staged rows, all or none; durable when this returns. `manifest`: its path below
        the data directory. The same call again has the same answer. Raises InvalidError,
        ConflictError."""
        document = {"manifest": manifest}
        return await _read(
            self._client, ImportViewModel, "POST", path_of("imports"), document, timeout_s=timeout_s
        )

    async def get(
        self, import_id: str, *, shard: int | None = None, timeout_s: float | None = None
    ) -> ImportViewModel:
        """How far an import is. Raises NotFoundError."""
        path = _of_shard(path_of("imports", import_id), shard)
        return await _read(self._client, ImportViewModel, "GET", path, timeout_s=timeout_s)

    def duplicates(
        self, import_id: str, *, shard: int | None = None, page: int = 1000
    ) -> AsyncIterator[DuplicateModel]:
        """Rows that an adopted import left out, since another message has their key, in row order.
        Raises NotFoundError."""

        path = path_of("imports", import_id, "duplicates")
        return self._client._pages(path, "duplicates", DuplicateModel, page, shard=shard)

    def archives(self, *, page: int = 100) -> AsyncIterator[ArchiveViewModel]:
        """Settled hours, the oldest first."""

        return self._client._pages(path_of("archives"), "hours", ArchiveViewModel, page)

    async def confirm_archive(
        self,
        hour: str,
        archive: ArchiveModel,
        *,
        shard: int | None = None,
        timeout_s: float | None = None,
    ) -> ArchiveConfirmedModel:
        """Confirm that an hour is archived, so that the server may delete it. `hour`: in UTC, such
        as `2026-11-20T15`. Raises NotFoundError; ConflictError where `archive` does not cover the
        hour."""
        path = _of_shard(path_of("archives", hour), shard)
        return await _read(
            self._client, ArchiveConfirmedModel, "PUT", path, archive, timeout_s=timeout_s
        )


class AsyncClientTokens:
    """Tokens, which carry the rights of their holders."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    async def own(self, *, timeout_s: float | None = None) -> OwnTokenDocument:
        """The scopes and the rate of the token of this client."""
        path = path_of("tokens", "self")
        return await _read(self._client, OwnTokenDocument, "GET", path, timeout_s=timeout_s)

    def list(self, *, page: int = 100) -> AsyncIterator[TokenDocument]:
        """Tokens that are valid now, in the order of their names. It needs the scope `admin`."""

        return self._client._pages(path_of("tokens"), "tokens", TokenDocument, page)


class AsyncClientCluster:
    """The state of a server or of a cluster, for operators."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    async def map(self, *, timeout_s: float | None = None) -> ClusterDocument:
        """The shards, and the node that owns each."""
        path = path_of("cluster")
        return await _read(self._client, ClusterDocument, "GET", path, timeout_s=timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> StatsDocument:
        """Counts of pending, leased and settled messages since the process started."""
        path = path_of("stats")
        return await _read(self._client, StatsDocument, "GET", path, timeout_s=timeout_s)

    async def forecast(
        self, bucket: Delay = "1h", *, timeout_s: float | None = None
    ) -> ForecastDocument:
        """How many messages fall due in each `bucket`, a whole number of hours. Raises
        InvalidError."""
        path = f"{path_of('forecast')}?{urlencode({'bucket': duration(bucket)})}"
        return await _read(self._client, ForecastDocument, "GET", path, timeout_s=timeout_s)

    def subjects(self, *, page: int = 100) -> AsyncIterator[SubjectDocument]:
        """Subjects that the token may publish or consume, by name, with the counts of each."""

        return self._client._pages(path_of("subjects"), "subjects", SubjectDocument, page)

    async def metrics(self, *, timeout_s: float | None = None) -> str:
        """All metrics, in the text format of Prometheus."""
        answer = await self._client._call("GET", "/metrics", timeout_s=timeout_s)
        return answer.body.decode()

    async def is_alive(self, *, timeout_s: float | None = None) -> bool:
        """Whether the process serves. Asks once: a server that is away raises UnansweredError."""
        return await self._is_ok("/healthz", timeout_s)

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server has recovered and takes messages. Asks once, as `is_alive`."""
        return await self._is_ok("/readyz", timeout_s)

    async def _is_ok(self, path: str, timeout_s: float | None) -> bool:
        self._client._settle()
        patience_s = self._client._timeout_s if timeout_s is None else timeout_s
        answer = await self._client._way_to(None)("GET", path, timeout_s=patience_s)
        return answer.status == HTTPStatus.OK


async def _read(
    client: RetryingClient,
    answer_type: type[T],
    method: str,
    path: str,
    document: object = None,
    *,
    timeout_s: float | None,
) -> T:
    answer = await client._call(method, path, document, timeout_s=timeout_s)
    return decoded(answer.body, answer_type)


def _of_shard(path: str, shard: int | None) -> str:
    return path if shard is None else f"{path}?shard={shard}"
