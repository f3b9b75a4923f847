"""From the bytes of a request to a struct, or all that is wrong with them.

A decoder stops at the first error. A good document is decoded once; one that was refused is decoded
once more, field by field, so that every bad field is named, with a pointer to it.

Cost: that of the decoder; 20 µs for a document that was refused. Threads: pure.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from delayserver.errors import InputError, InputErrors
from delayserver.wire.fields import decode_field

T = TypeVar("T", bound=msgspec.Struct)

POINTED_ERRORS_MAX = 1000
"""A problem document names so many errors."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for a document that it cannot decode."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@cache
def decoder_of(form: Any) -> Callable[[bytes], Any]:
    """Decodes values of a type of `delayserver.wire`."""
    return msgspec.json.Decoder(form, dec_hook=decode_field).decode


def read(data: bytes, form: type[T]) -> T:
    """A document as JSON. Raises InputError, or InputErrors with everything that is wrong."""
    try:
        found: T = decoder_of(form)(data)
    except UNREADABLE as error:
        _, errors = readable_fields(data, form)
        raise in_one(errors or [input_error(error)]) from error
    return found


def readable_fields(
    data: bytes, form: type[msgspec.Struct]
) -> tuple[dict[str, object], list[InputError]]:
    """The fields of a JSON object that can be read as those of `form`, and everything that is wrong
    with the others: unknown, missing, or of another type."""
    try:
        raws = raw_fields(data)
    except InputError as error:
        return {}, [error]
    return check_fields(raws, form)


def raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, as they stand there. Raises InputError."""
    if not data.strip():
        raise InputError("the request has no body; it is a JSON object")
    try:
        data.decode()
        return _decode_fields(data)
    except UNREADABLE as error:
        raise input_error(error) from error


def check_fields(
    raws: Mapping[str, msgspec.Raw], form: type[msgspec.Struct], pointer: str = ""
) -> tuple[dict[str, object], list[InputError]]:
    """As `readable_fields`, of an object that stands at `pointer`."""
    values: dict[str, object] = {}
    errors: list[InputError] = []
    fields = msgspec.structs.fields(form)
    for field in fields:
        at = pointer + pointer_to(field.encode_name)
        if (raw := raws.get(field.encode_name)) is not None:
            try:
                values[field.name] = decoder_of(field.type)(raw)
            except UNREADABLE as error:
                errors += errors_of(raw, field.type, at) or [input_error(error, at)]
        elif field.required:
            detail = f"Object missing required field `{field.encode_name}`"
            errors.append(InputError(detail, at))
    unknown = raws.keys() - {field.encode_name for field in fields}
    errors += [
        InputError(f"Object contains unknown field `{name}`", pointer + pointer_to(name))
        for name in raws
        if name in unknown
    ]
    return values, errors


def errors_of(raw: bytes, kind: Any, pointer: str) -> list[InputError]:
    """Everything that is wrong with the parts of a value; empty where it has none, or they are
    good."""
    for one in alternatives(kind):
        arguments = get_args(one)
        try:
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                return check_fields(_decode_fields(raw), one, pointer)[1]
            if get_origin(one) in (list, tuple):
                items = enumerate(_decode_items(raw))
                return _errors_of_each(items, arguments[0], pointer)
            if get_origin(one) is dict:
                return _errors_of_each(_decode_fields(raw).items(), arguments[1], pointer)
        except UNREADABLE:
            continue  # The value is no object, or no list.
    return []


def _errors_of_each(
    items: Iterable[tuple[int | str, msgspec.Raw]], kind: Any, pointer: str
) -> list[InputError]:
    errors: list[InputError] = []
    decode = decoder_of(kind)
    for step, raw in items:
        try:
            decode(raw)
        except UNREADABLE as error:
            at = pointer + pointer_to(step)
            errors += errors_of(raw, kind, at) or [input_error(error, at)]
            if len(errors) >= POINTED_ERRORS_MAX:
                break
    return errors


def alternatives(kind: Any) -> list[Any]:
    """The types that a field may have, without their descriptions and limits."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for part in get_args(kind) for one in alternatives(part)]
    return [kind]


def in_one(errors: list[InputError]) -> InputError:
    """Everything that is wrong with one document, as one error."""
    if len(errors) == 1:
        return errors[0]
    detail = "; ".join(f"{one.pointer}: {one.detail}".lstrip(": ") for one in errors[:5])
    return InputErrors(detail, errors)


def pointer_to(*steps: str | int) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


_AT = " - at `"
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def input_error(error: Exception, pointer: str = "") -> InputError:
    """A decoder's error (UNREADABLE) with a JSON pointer to the field, below `pointer`."""
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"not UTF-8: {error.reason} (byte {error.start})", pointer)
    if isinstance(error, RecursionError):
        return InputError("nested too deeply", pointer)
    text = str(error)
    # The text may quote the client, who may have sent any number of places: the last one is ours.
    detail, at, path = text.removesuffix("`").rpartition(_AT)
    if at and text.endswith("`"):
        text = detail
        for name, index in _STEP.findall(path):
            pointer += pointer_to(name or index)
    if text == "Input data was truncated":
        text = "the JSON ends too early, or there is none"
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    if named is not None:
        pointer += pointer_to(named["name"])
    return InputError(text, pointer)
