"""A task as Celery puts it onto the broker, as the body of a message of the delay server.

The body of the task is the output of Celery's serializer and compression, and we do not look into
it. Headers and properties may hold values that kombu's JSON knows besides JSON (datetimes, UUIDs,
bytes). kombu's JSON writes and reads them, so that the same values arrive.

The routing is the one that Celery had decided: exchange, routing key, and the names of the queues
to declare. The app that forwards defines these queues.

Cost: 20 µs each way. Threads: pure.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec
from kombu import Exchange, Queue
from kombu.compression import compress, decompress
from kombu.exceptions import KombuError
from kombu.serialization import dumps, loads, prepare_accept_content
from kombu.utils import json

from delayserver.errors import DelayServerError


class NotATaskError(DelayServerError):
    """The message is not one that `DelayedTasks` has stored."""


class WireTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message that is published onto the broker when the task is due."""

    body: str
    """Text, or base64 if `is_base64`."""
    is_base64: bool = False
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    """Arguments of kombu's `Producer.publish`: priority, correlation_id, delivery_mode, …"""
    exchange: str
    routing_key: str
    queues: list[str] = []
    """Names of the queues to declare."""
    expires_at_ms: int | None = None
    """When the broker may drop it, in ms since the epoch."""

    @classmethod
    def make(
        cls,
        body: object,
        *,
        now_ms: int,
        exchange: Exchange | str,
        routing_key: str,
        headers: Mapping[str, Any],
        serializer: str | None = None,
        compression: str | None = None,
        declare: Iterable[Exchange | Queue] | None = None,
        expiration: float | None = None,
        **properties: Any,
    ) -> Self:
        """Built from the arguments that Celery hands to kombu's `Producer.publish`; `expiration` is
        in seconds from `now_ms`. Raises kombu.exceptions.EncodeError if the arguments cannot be
        serialized."""
        content_type, content_encoding, encoded = dumps(body, serializer=serializer)
        headers = dict(headers)
        data: str | bytes = encoded
        if compression:
            data, headers["compression"] = compress(encoded, compression)
        is_base64 = isinstance(data, bytes)
        return cls(
            body=base64.b64encode(data).decode() if isinstance(data, bytes) else data,
            is_base64=is_base64,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers,
            properties=properties,
            exchange=exchange.name if isinstance(exchange, Exchange) else exchange,
            routing_key=routing_key,
            queues=[one.name for one in declare or () if isinstance(one, Queue)],
            expires_at_ms=None if expiration is None else now_ms + int(expiration * 1000),
        )

    def encode(self) -> bytes:
        """The body of a message, in JSON. Raises TypeError for headers that JSON cannot express."""
        return json.dumps(msgspec.structs.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The task from such a body. Raises NotATaskError."""
        try:
            return msgspec.convert(json.loads(data), cls)
        except (ValueError, TypeError) as error:
            raise NotATaskError(
                f"this is no task of Celery: {error}; nothing but DelayedTasks may publish "
                "under its subject, and apps of different brokers need different subjects"
            ) from error

    @property
    def data(self) -> str | bytes:
        """The body as Celery has made it. Raises NotATaskError."""
        if not self.is_base64:
            return self.body
        try:
            return base64.b64decode(self.body, validate=True)
        except binascii.Error as error:
            raise NotATaskError(f"the body of the task is not base64: {error}") from error

    def content(self, accept: Iterable[str]) -> Any:
        """The decoded body. In the usual protocol it is a triple of arguments, keyword arguments,
        and embedded options (callbacks, chain, chord). `accept`: content types, or names of
        serializers.

        Raises NotATaskError if it cannot be read, or if `accept` does not allow it."""
        data = self.data
        try:
            if isinstance(data, bytes) and (kind := self.headers.get("compression")):
                data = decompress(data, kind)
            return loads(
                data, self.content_type, self.content_encoding, prepare_accept_content(accept)
            )
        except (KombuError, KeyError, ValueError, zlib.error) as error:
            raise NotATaskError(f"the body of the task cannot be read: {error}") from error

    def expiration_s(self, now_ms: int) -> float | None:
        """The seconds until the broker may drop the task; None: it does not expire."""
        if self.expires_at_ms is None:
            return None
        return max(0, self.expires_at_ms - now_ms) / 1000
