"""Tables that are text: the cells of CSV, the fields of JSON, exactly as they stand in the file.

    CSV     a cell is text. In quotes it may hold separators, line breaks and doubled quotes
            (RFC 4180); blanks and backslashes mean themselves. Nothing between two separators is
            null, "" is empty text
    JSON    an object in each line, or an array of objects. A field is the text of its value: 1.10
            stays 1.10, and no object gets the fields of another

A row that is malformed is handed back as such, with its text. A quote that is not closed, or is
followed by more text, makes all lines up to there one malformed row: a part of a cell is never
taken for a row.

The encoding is UTF-8, or the one of a byte order mark, or the one that is named. Bytes that are not
in it are kept as lone surrogates (PEP 383), so that they are seen.

Python's csv module was rejected, because it drops quotes that stand where they must not, cannot
tell an empty cell from empty text, and takes the escape character in cells without quotes, too.

Cost: CSV 0.5 µs per row and 2 µs per quoted cell, JSON 2 µs per line; memory of a row, of a JSON
array the whole file. Threads: pure, but for the file.
"""

import codecs
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, cast

import msgspec

from delayserver.errors import PipelineError

CELL_MAX_CHARACTERS: Final = 64 * 1024 * 1024
"""A quoted cell that is longer counts as never closed."""
_LOOK_BYTES: Final = 4096
_BUFFER_BYTES: Final = 1024 * 1024
_BOMS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LINE_ENDS: Final = ("", "\n", "\r\n", "\r")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that is no row."""

    text: str | bytes
    lines: int = 1

    @property
    def reason(self) -> str:
        """The text for the reject file."""
        return "malformed line" + (f": {self.lines} lines" if self.lines > 1 else "")


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the text of a table is written."""

    encoding: str | None = None
    """None: UTF-8, or the encoding of a byte order mark."""
    separator: str = ","
    quote: str = '"'
    """Empty: no cell is quoted."""
    escape: str = ""
    """A character that makes a quote part of a cell, besides doubling; in Spark's writer `\\`."""
    null: str | None = None
    """A cell without quotes that stands for null, besides the empty one."""
    has_header: bool = True
    is_one_document: bool = False
    """JSON: the file is one object or array, over several lines."""


def options_of(kind: str, given: Mapping[str, str]) -> TextFormat:
    """The format of text, from options of Spark's readers. Raises PipelineError for other options:
    some of them would change values, or leave rows out."""
    found = TextFormat()
    for name, value in given.items():
        lower, is_csv = name.lower(), kind == "csv"
        if lower in ("encoding", "charset"):
            found = _with(found, encoding=value)
        elif lower == "multiline":
            found = _with(found, is_one_document=_is_true(name, value) and not is_csv)
        elif lower == "mode" and value.upper() == "PERMISSIVE":
            continue  # Rows are always read in this mode.
        elif is_csv and lower in ("sep", "delimiter"):
            found = _with(found, separator="\t" if value == "\\t" else value)
        elif is_csv and lower == "quote":
            found = _with(found, quote=value)
        elif is_csv and lower == "escape":
            found = _with(found, escape=value)
        elif is_csv and lower == "nullvalue":
            found = _with(found, null=value)
        elif is_csv and lower == "header":
            found = _with(found, has_header=_is_true(name, value))
        else:
            known = "encoding, multiLine"
            known = f"sep, quote, escape, nullValue, header, {known}" if is_csv else known
            raise PipelineError(
                f"the option {name}={value} is not known for {kind} files; known are {known}. "
                "Cells are read as they stand, and their types are not guessed"
            )
    for name, value in (("quote", found.quote), ("escape", found.escape)):
        if len(value) > 1:
            raise PipelineError(f"the option {name} is one character, not {value!r}")
    if not found.separator or set(found.separator) & set(f"{found.quote}\r\n"):
        raise PipelineError(f"{found.separator!r} cannot be the separator of a CSV file")
    return found


def _with(found: TextFormat, **changes: object) -> TextFormat:
    fields = {name: getattr(found, name) for name in TextFormat.__slots__}
    return TextFormat(**{**fields, **changes})


def _is_true(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise PipelineError(f"the option {name} is true or false, not {value!r}")
    return value.lower() == "true"


# ── encodings ──────────────────────────────────────────────────────────────────────────────────


def encoding_of(begin: bytes, given: str | None) -> str:
    """The name that Python has for the encoding; `begin`: the first bytes. Raises PipelineError."""
    if given is not None:
        try:
            name = codecs.lookup(given).name
        except LookupError:
            raise PipelineError(f"there is no encoding {given!r}") from None
        found = next((one for bom, one in _BOMS if begin.startswith(bom)), name)
        if found != name and not name.startswith((found, "utf-8")):
            raise PipelineError(f"its first bytes say that it is {found}, not {given}")
        return name
    found = next((one for bom, one in _BOMS if begin.startswith(bom)), "utf-8")
    if found == "utf-8" and begin.count(0) * 4 > len(begin):
        raise PipelineError(
            "it is full of zero bytes, as UTF-16 without a byte order mark is: say which encoding "
            "it is (--option encoding=UTF-16LE)"
        )
    return found


class TextLines(Iterator[str]):
    """The lines of a text with their ends, without a byte order mark."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._is_begin = True
        self._is_first_row = True
        self.end = ""
        """How the first row ends. A `\r` before another end is a part of a cell: some programs
        write it without quotes."""

    def __next__(self) -> str:
        self._is_first_row = not self.end
        return self._next()

    def more(self) -> str | None:
        """The next line where the row goes on; None: there is none."""
        try:
            return self._next()
        except StopIteration:
            return None

    def _next(self) -> str:
        line = next(self._text)
        if self._is_begin:
            self._is_begin = False
            line = line.removeprefix("\ufeff")
        if self._is_first_row:
            ends = (one for one in ("\r\n", "\r") if line.endswith(one))
            self.end = next(ends, "\n")
        return line


def lines_of(stream: BinaryIO, given: str | None) -> TextLines:
    """The lines of a file. Raises PipelineError if its encoding is not known."""
    begin = stream.read(_LOOK_BYTES)
    encoding = encoding_of(begin, given)
    sample = begin.decode(encoding, "ignore")
    whole = io.BufferedReader(_Again(begin, stream), _BUFFER_BYTES)
    newline = "\r" if "\r" in sample and "\n" not in sample else "\n"
    return TextLines(io.TextIOWrapper(whole, encoding, errors="surrogateescape", newline=newline))


class _Again(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, begin: bytes, stream: BinaryIO) -> None:
        self._begin, self._stream = begin, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        data = self._begin[: len(buffer)] or self._stream.read(len(buffer))
        self._begin = self._begin[len(data) :]
        buffer[: len(data)] = data
        return len(data)


# ── CSV ────────────────────────────────────────────────────────────────────────────────────────

Cells = list[str | None]


def csv_header(lines: TextLines, style: TextFormat) -> list[str]:
    """The names of the columns, from the first row; a column without one is `_c` and its number.

    Raises PipelineError if the file has no row."""
    first = next(csv_rows(lines, style), None)
    if first is None:
        raise PipelineError("it is empty, and a CSV file begins with the names of its columns")
    if isinstance(first, Malformed):
        raise PipelineError("its first line, with the names of the columns, is malformed")
    return [name or f"_c{number}" for number, name in enumerate(first)]


def csv_rows(lines: TextLines, style: TextFormat) -> Iterator[Cells | Malformed]:
    """The rows of a CSV file, without blank lines. Raises PipelineError for a cell that does not
    end."""
    separator, quote, null = style.separator, style.quote, style.null
    cut = _Cutter(style) if quote else None
    for line in lines:
        if not line.rstrip("\r\n"):
            continue
        if cut is not None and quote in line:
            yield cut(line, lines)
            continue
        text = _without_end(line, lines.end)
        if text is None:
            yield Malformed(line)
        else:
            yield [None if cell in ("", null) else cell for cell in text.split(separator)]


def _without_end(line: str, end: str) -> str | None:
    """The text of a line, or of its last cell; None: it ends with a `\\r` that may be a part of the
    cell, or of the end. `end`: of the first line."""
    if end == "\r\n" and line.endswith(end):
        return line[:-2]
    text = line[:-1] if line[-1:] in ("\n", end) else line
    return None if text.endswith("\r") and end == "\n" else text


class _Cutter:
    """Cuts rows with quotes into cells."""

    def __init__(self, style: TextFormat) -> None:
        self._style = style
        quote, escape = re.escape(style.quote), re.escape(style.escape)
        if style.escape in ("", style.quote):
            plain, special = f"[^{quote}]*+", quote * 2
        else:
            plain, special = f"[^{quote}{escape}]*+", f"{escape}.|{quote * 2}"
        self._inner = re.compile(f"{plain}(?:(?:{special}){plain})*+", re.DOTALL)
        self._escaped = re.compile(f"{escape}([{quote}{escape}])|{quote * 2}")

    def __call__(self, line: str, lines: TextLines) -> Cells | Malformed:
        """The cells of a row that begins with this line; it may take more of `lines`."""
        style, read, cells, at = self._style, [line], Cells(), 0
        while True:
            if line.startswith(style.quote, at):
                parts, at, characters = [], at + 1, 0
                while True:
                    found = self._inner.match(line, at)
                    assert found is not None  # It matches nothing, too.
                    parts.append(found[0])
                    at, characters = found.end(), characters + len(found[0])
                    if at < len(line):
                        break
                    if characters > CELL_MAX_CHARACTERS:
                        raise PipelineError(
                            f"a cell in quotes does not end: {read[0][:200].rstrip()!r}"
                        )
                    following = lines.more()
                    if following is None:
                        return Malformed("".join(read), len(read))
                    read.append(following)
                    line, at = following, 0
                at += 1
                cells.append(self._plain("".join(parts)))
                if line[at:] in _LINE_ENDS:
                    return cells
                if not line.startswith(style.separator, at) or line[at - 1] != style.quote:
                    return Malformed("".join(read), len(read))
                at += len(style.separator)
                continue
            end = line.find(style.separator, at)
            cell = _without_end(line[at:], lines.end) if end < 0 else line[at:end]
            if cell is None:
                return Malformed("".join(read), len(read))
            cells.append(None if cell in ("", style.null) else cell)
            if end < 0:
                return cells
            at = end + len(style.separator)

    def _plain(self, text: str) -> str:
        style = self._style
        if style.quote not in text and (not style.escape or style.escape not in text):
            return text
        if style.escape in ("", style.quote):
            return text.replace(style.quote * 2, style.quote)
        return self._escaped.sub(lambda found: found[1] or style.quote, text)


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────

Fields = dict[str, msgspec.Raw]
_decode_object = msgspec.json.Decoder(Fields).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_BLANKS: Final = b" \t\r\n"


def json_rows(stream: BinaryIO, style: TextFormat) -> Iterator[Fields | Malformed]:
    """The objects of a file, each field as it stands. Raises PipelineError for an array that is
    malformed."""
    begin = stream.read(_LOOK_BYTES)
    encoding = encoding_of(begin, style.encoding)
    rest = io.BufferedReader(_Again(begin, stream), _BUFFER_BYTES)
    lines: Iterator[bytes] = iter(rest)
    if encoding not in ("utf-8", "ascii"):
        decoded = lines_of(cast(BinaryIO, rest), style.encoding)
        lines = (line.encode("utf-8", "surrogateescape") for line in decoded)
    yield from rows_of_lines(lines, style)


def rows_of_lines(
    lines: Iterator[bytes], style: TextFormat, *, is_begin: bool = True
) -> Iterator[Fields | Malformed]:
    """The objects of these lines of JSON in UTF-8. `is_begin`: the file begins with them. Raises
    the PipelineError of `json_rows`."""
    for number, line in enumerate(lines):
        text = line.strip(_BLANKS)
        if is_begin and not number:
            text = text.removeprefix(codecs.BOM_UTF8).strip(_BLANKS)
        if not text:
            continue
        # The first row decides: a later one that begins like an array is malformed.
        if is_begin and (text[:1] == b"[" or style.is_one_document):
            yield from _rows_of_document(text + b"\n" + b"".join(lines))
            return
        is_begin = False
        yield _object(text)


def _rows_of_document(text: bytes) -> Iterator[Fields | Malformed]:
    text = text.strip(_BLANKS)
    if text[:1] == b"{":
        yield _object(text)
        return
    try:
        items: Sequence[msgspec.Raw] = _decode_items(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PipelineError(f"it begins as a JSON array, and is none: {error}") from error
    for item in items:
        yield _object(bytes(item))


def _object(text: bytes) -> Fields | Malformed:
    try:
        return _decode_object(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Malformed(text)
