"""New messages: a client's messages to publish, checked, and as they will be logged.

One message is an object (`NewMessage`), many are columns (`PublishBatch`): lists of one length, so
that each step of publishing goes over all messages once and makes no object for each. Both become
the same bytes; a property test publishes either way and compares.

The digest tells whether two messages under one key have the same content. A trace context goes
along with a message and is no part of its content: publishing again with another one is the same
message, so the digest is taken before the context is added.

Cost: 1 µs to encode one of many. Threads: pure.
"""

from collections.abc import Sequence
from copy import copy
from typing import Final

import msgspec

from delayserver.decisions.packing import Publishes
from delayserver.records.content import digest_of, digests_of, in_order, is_ordered
from delayserver.records.direct import Destination
from delayserver.records.message import (
    HEADERS_BYTES_MAX,
    Content,
    MessageOptions,
    Payload,
    Watch,
    encode_payload,
    encode_payloads,
)
from delayserver.records.tracecontext import Trace, with_trace
from delayserver.slices import Work
from storage.frame import CRC_BYTES, crcs_of, seal, sealed_crc


class NewMessage(msgspec.Struct):
    """A message that a client wants to publish, checked and with an absolute due time."""

    subject: str
    due_ms: int
    payload: Payload
    trace: Trace | None = None
    """Goes along with it, and is no part of its content."""

    def outcome_subjects(self) -> set[str]:
        """Under which messages with its outcome will be published."""
        return _subjects_of(self.payload.options)


class PublishBatch(msgspec.Struct):
    """Messages that a client wants to publish together, as columns of one length."""

    subjects: list[str]
    dues_ms: list[int]
    bodies: list[bytes]
    contents: list[Content]
    keys: list[str | None]
    headers: list[dict[str, str] | None]
    watches: list[Watch | None]
    traces: list[Trace | None]
    options: list[MessageOptions | None] = []
    """Empty where no message has any."""

    def __len__(self) -> int:
        return len(self.subjects)

    def to(self, index: int) -> Destination | None:
        """Where the message at `index` says that it goes."""
        options = self.options[index] if self.options else None
        return None if options is None else options.to

    def message(self, index: int) -> NewMessage:
        """The message at `index`, as an object."""
        payload = Payload(
            self.bodies[index],
            self.contents[index],
            self.keys[index],
            self.headers[index],
            watch=self.watches[index],
            options=self.options[index] if self.options else None,
        )
        return NewMessage(self.subjects[index], self.dues_ms[index], payload, self.traces[index])

    def outcome_subjects(self, index: int | None = None) -> set[str]:
        """Under which messages with the outcome of one will be published; None: of any."""
        options = self.options
        if index is not None:
            return _subjects_of(options[index]) if options else set()
        return set().union(*map(_subjects_of, options))

    def extend(self, more: "PublishBatch") -> None:
        """Add the messages of another batch, but for their options."""
        for name in self.__struct_fields__:
            if name != "options":
                getattr(self, name).extend(getattr(more, name))

    def select(self, indexes: Sequence[int]) -> "PublishBatch":
        """Some of the messages."""
        *columns, options = (getattr(self, name) for name in self.__struct_fields__)
        chosen = PublishBatch(*([column[index] for index in indexes] for column in columns))
        if options:
            chosen.options = [options[index] for index in indexes]
        return chosen


def _subjects_of(options: MessageOptions | None) -> set[str]:
    if options is None or options.outcomes is None:
        return set()
    outcomes = options.outcomes
    return {one for one in (outcomes.delivered, outcomes.dead) if one is not None}


SEALED_ROWS: Final = 1_000
"""Messages that are sealed at a time."""


class SealedBatch:
    """A batch with its payloads as they will be logged: encoded, and their checksums."""

    def __init__(self, batch: PublishBatch, payloads: list[bytes] | None = None) -> None:
        """`payloads`: where they are encoded already."""
        self.batch = batch
        self.payloads = _encoded(batch, 0, len(batch)) if payloads is None else payloads
        self.crcs = crcs_of(self.payloads)
        self._digests: list[int] | None = None
        self.key_hashes: list[bytes] = []
        """Empty: not known, or there are none."""

    @classmethod
    def sealing(cls, batch: PublishBatch) -> Work["SealedBatch"]:
        """The same, in slices, if it is long; it does not depend on events meanwhile."""
        count = len(batch)
        if count <= SEALED_ROWS:
            return cls(batch)
        payloads: list[bytes] = []
        for start in range(0, count, SEALED_ROWS):
            payloads += _encoded(batch, start, start + SEALED_ROWS)
            yield SEALED_ROWS // 4
        made = cls(batch, payloads)
        if any(batch.keys):
            yield SEALED_ROWS // 4
            made.digests()
            yield count // 20
        return made

    @property
    def total_bytes(self) -> int:
        """Bytes of all sealed payloads."""
        return sum(map(len, self.payloads)) + CRC_BYTES * len(self.payloads)

    def digests(self) -> list[int]:
        """The digest of the content of each message with a key (`delayserver.records.content`), 0
        of the others."""
        if self._digests is None:
            self._digests = self._find_digests()
        return self._digests

    def _find_digests(self) -> list[int]:
        batch, datas, crcs = self.batch, self.payloads, self.crcs
        if any(batch.headers):
            datas, crcs = datas.copy(), crcs.copy()
            for index, headers in enumerate(batch.headers):
                if headers is not None and not is_ordered(headers):
                    sealed = in_order(batch.message(index).payload, b"")
                    datas[index], crcs[index] = sealed[CRC_BYTES:], sealed_crc(sealed)
        if None not in batch.keys:
            return digests_of(datas, crcs)
        return [
            0 if key is None else digest_of(data, crc)
            for key, data, crc in zip(batch.keys, datas, crcs, strict=True)
        ]

    def select(self, indexes: Sequence[int]) -> "SealedBatch":
        """Some of the messages."""
        chosen = copy(self)
        chosen.batch = self.batch.select(indexes)
        chosen.payloads = [self.payloads[index] for index in indexes]
        chosen.crcs = [self.crcs[index] for index in indexes]
        chosen.key_hashes, chosen._digests = [], None
        return chosen


def _encoded(batch: PublishBatch, start: int, end: int) -> list[bytes]:
    """The payloads of some of the messages of a batch."""
    return encode_payloads(
        batch.bodies[start:end],
        batch.contents[start:end],
        batch.keys[start:end],
        batch.headers[start:end],
        batch.watches[start:end],
        batch.options[start:end],
    )


def stored(message: NewMessage, sealed: bytes) -> bytes:
    """The logged bytes of a message: its payload, with the trace context if there is one and room
    for it."""
    if message.trace is None:
        return sealed
    payload = message.payload
    headers = with_trace(payload.headers, message.trace, max_bytes=HEADERS_BYTES_MAX)
    if headers is None:
        return sealed
    return encode_payload(msgspec.structs.replace(payload, headers=headers))


def with_traces(new: SealedBatch, publishes: Publishes) -> Publishes:
    """Records whose payloads hold the trace contexts of their messages, too. See `stored`."""
    payloads = [
        stored(new.batch.message(index), seal(data))[CRC_BYTES:]
        for index, data in enumerate(new.payloads)
    ]
    return publishes._replace(payloads=payloads, crcs=crcs_of(payloads))
