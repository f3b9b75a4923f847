"""Stored definitions, read again: understood, or not understood and why.

    bytes ──▶ Understanding.read ──▶ (definition, "")
                                └──▶ (a stand-in, "why it is not understood")

A definition was checked when a client put it, and yet a later process may not understand it: the
zone is missing on this machine, a newer server has written a field or a value that is not known
here, a limit was lowered, or a library reads less than it did. Such a definition harms only itself.
It stands still and keeps its bytes; lists show it with the reason; it can be paused, replaced and
deleted; and it goes on when a process understands it again.

The stand-in has each field that can be read by itself, and `fallbacks` for the others. So a
list of definitions needs no second way to show one. Code that acts on one looks at the reason
first.

Rejected: exceptions. Each place that reads a definition would have to catch them, and the one that
forgot would end the start, the event loop, or a whole page of a list.

Cost: that of the decoder and the check; a stand-in takes 20 µs. Threads: pure.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from delayserver.errors import InputError

REASON_CHARACTERS_MAX: Final = 300

T = TypeVar("T", bound=msgspec.Struct)
_Parts = dict[str, msgspec.Raw]


class Understanding(Generic[T]):
    """How values of one kind of struct are read (MessagePack)."""

    def __init__(
        self,
        kind: type[T],
        fallbacks: Mapping[str, object],
        check: Callable[[T], object] = lambda value: None,
    ) -> None:
        """`fallbacks`: the value in a stand-in of each field without a default that cannot be read.
        `check` may raise any error where a value cannot be used here."""
        self._kind = kind
        self._fallbacks = fallbacks
        self._check = check
        self._fields = msgspec.structs.fields(kind)
        self._is_array = kind.__struct_config__.array_like
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def read(self, data: bytes, **known: object) -> tuple[T, str]:
        """The definition in such bytes, and why it is not understood; empty: it is. Never raises.

        `known`: fields of a stand-in that the caller knows, such as the name, from the key."""
        # A library or the machine may raise anything for a definition; we cannot foresee it.
        try:
            value = self._decode(data)
            if self._is_array and (more := _length(data) - len(self._fields)) > 0:
                return self.stand_in(data, **known), f"it has {more} fields that are not known here"
            self._check(value)
        except Exception as error:
            return self.stand_in(data, **known), reason_of(error)
        return value, ""

    def is_whole(self, data: bytes) -> bool:
        """Whether such bytes are intact as far as can be told: they have fields."""
        return bool(self._parts(data))

    def stand_in(self, data: bytes, **known: object) -> T:
        """The fields that can be read by themselves, and the fallbacks of the others."""
        parts = self._parts(data)
        values: dict[str, Any] = {}
        for field in self._fields:
            if field.name in known:
                values[field.name] = known[field.name]
                continue
            try:
                values[field.name] = msgspec.msgpack.decode(parts[field.name], type=field.type)
            except Exception:
                if field.name in self._fallbacks:
                    values[field.name] = self._fallbacks[field.name]
        return self._kind(**values)

    def _parts(self, data: bytes) -> _Parts:
        if not self._is_array:
            return parts_of(data)
        try:
            found = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
        except Exception:
            return {}
        return {field.name: part for field, part in zip(self._fields, found, strict=False)}


def parts_of(data: bytes) -> _Parts:
    """The fields of a struct that is stored as a map, each as its bytes; none if it is no map."""
    try:
        return msgspec.msgpack.decode(data, type=_Parts)
    except Exception:
        return {}


def elements_behind(data: bytes, kind: type[msgspec.Struct]) -> bytes | None:
    """The elements of a stored array behind those of the fields of `kind`, as an array; empty:
    there are none. None: it is no such array."""
    try:
        msgspec.msgpack.decode(data, type=kind)
        parts = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except Exception:
        return None
    more = parts[len(msgspec.structs.fields(kind)) :]
    return msgspec.msgpack.encode(more) if more else b""


def with_elements(data: bytes, more: bytes) -> bytes:
    """A stored array with `elements_behind` it again."""
    if not more:
        return data
    decode = msgspec.msgpack.decode
    return msgspec.msgpack.encode(
        [*decode(data, type=list[msgspec.Raw]), *decode(more, type=list[msgspec.Raw])]
    )


def reason_of(error: Exception) -> str:
    """An error in one line, for people."""
    if isinstance(error, InputError):
        pointer = f" ({error.pointer.removeprefix('/')})" if error.pointer else ""
        text = f"{error.detail}{pointer}"
    elif isinstance(error, msgspec.MsgspecError | ValueError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text[:REASON_CHARACTERS_MAX] or type(error).__name__


def _length(data: bytes) -> int:
    """How many elements a MessagePack array has that was decoded."""
    if data[0] >> 4 == 9:
        return data[0] & 15
    size = 2 if data[0] == 0xDC else 4
    return int.from_bytes(data[1 : 1 + size], "big")
