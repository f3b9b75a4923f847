"""Batches in MessagePack: made into JSON, item by item, before anything else looks at them.

    bytes ──▶ skip the next item: is it whole, and short enough? ──▶ a value that JSON has ──▶ JSON

A byte of MessagePack can become an object of 60 bytes, and a few bytes can claim an array of four
thousand million. So an item is skipped before it is made: that proves that all of its bytes are
there. One item is made at a time, and the JSON of all is no longer than a batch may be. Values that
JSON does not have (NaN, infinity, binary but for a whole body, extensions, keys that are not text)
are refused: the server stores a message as it was sent, or not at all.

Cost: 1.5 µs an item; memory: the batch, its JSON, and the objects of one item. Threads: pure; work
for long batches is cut into slices by the caller.
"""

import base64
import gc
import json
import re
from typing import Any, Final

import msgpack
import msgspec

from delayserver.errors import InputError, TooLargeError
from delayserver.slices import Work

SLICE_BYTES: Final = 256 * 1024
"""The bytes that are read at a time: some 20 ms at worst, where each byte is an object."""
SLICE_ITEMS: Final = 500
"""The same, in items, as `slices` counts."""

_encode = msgspec.json.Encoder().encode
_MAYBE_NOT_JSON = re.compile(
    rb"[\xc4-\xc6]"  # binary
    rb"|\xcb[\x7f\xff][\xf0-\xff]|\xca[\x7f\xff][\x80-\xff]"  # NaN, infinity
)
"""Bytes without which an item holds neither; they may also be part of text or of a number."""


def json_items(
    data: bytes, *, count_max: int, item_max_bytes: int, total_max_bytes: int
) -> Work[list[bytes | InputError]]:
    """The items of a batch as JSON, or the errors in them, in slices.

    Raises InputError if it is no array in MessagePack, TooLargeError."""
    parser = msgpack.Unpacker(max_buffer_size=len(data) + 1)
    try:
        parser.feed(data[:SLICE_BYTES])
        count = parser.read_array_header()
    except (ValueError, msgpack.OutOfData) as error:
        raise InputError(f"not an array in MessagePack: {error}") from error
    if count > count_max:
        raise TooLargeError(f"{count} messages in a batch; at most {count_max}")
    items: list[bytes | InputError] = []
    fed, done, total = SLICE_BYTES, 0, 0
    for index in range(count):
        start = parser.tell()
        while not _has_skipped(parser, index):
            if fed >= len(data):
                raise InputError("the batch ends within it", f"/{index}")
            if fed - start > item_max_bytes:
                raise _too_long(item_max_bytes).below(f"/{index}")
            parser.feed(data[fed : fed + SLICE_BYTES])
            fed += SLICE_BYTES
            yield SLICE_ITEMS
        raw = data[start : parser.tell()]
        try:
            item = _json_of(raw, item_max_bytes)
        except InputError as error:
            items.append(error.below(f"/{index}"))
        else:
            items.append(item)
            total += len(item)
            if total > total_max_bytes:
                raise TooLargeError(f"as JSON the batch has more than {total_max_bytes} bytes")
        done += len(raw)
        if done >= SLICE_BYTES:
            done = 0
            yield SLICE_ITEMS
    if parser.tell() < len(data):
        raise InputError(f"{len(data) - parser.tell()} bytes follow the batch")
    return items


def _has_skipped(parser: msgpack.Unpacker, index: int) -> bool:
    """Go behind an item, if it is there as a whole. Raises InputError."""
    try:
        parser.skip()
    except msgpack.OutOfData:
        return False
    except ValueError as error:
        raise InputError(f"not MessagePack: {error}", f"/{index}") from error
    return True


def _too_long(max_bytes: int) -> InputError:
    return InputError(f"a message in MessagePack has at most {max_bytes} bytes")


def _json_of(raw: bytes, max_bytes: int) -> bytes:
    """An item as JSON. Raises InputError."""
    if len(raw) > max_bytes:
        raise _too_long(max_bytes)
    collects = len(raw) > SLICE_BYTES // 8 and gc.isenabled()
    if collects:
        gc.disable()  # Nothing here can be a cycle, and the collector would look at all of it.
    try:
        return _made(raw)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"not a message that JSON can express: {error}") from error
    finally:
        if collects:
            gc.enable()


def _made(raw: bytes) -> bytes:
    value: Any = msgpack.unpackb(raw, ext_hook=_refuse_extension)
    if _MAYBE_NOT_JSON.search(raw):
        body = value.get("body") if isinstance(value, dict) else None
        if isinstance(body, bytes):
            if "body_base64" in value:
                raise ValueError("give either body or body_base64, not both")
            del value["body"]
            value["body_base64"] = base64.b64encode(body).decode()
        json.dumps(value, allow_nan=False)
    return _encode(value)


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"an extension of type {code}")
