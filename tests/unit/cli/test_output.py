"""Tables: nothing is cut into pieces, whatever the screen is."""

import io

import pytest
from rich.console import Console

from delayserver.cli import output

DOCUMENT = {
    "id": "00000193d2a8b5c0000000000001aa55c3d2",
    "key": "order-1001",
    "deliver_at": "2026-11-20T16:30:00.000Z",
    "state": "scheduled",
    "body": {"order": 1001, "note": "twenty letters and more"},
}
COLUMNS = ("id", "key", "deliver_at", "state", "body")


def shown(width, *, is_terminal=True):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None
    )
    console.print(output.rows([DOCUMENT, DOCUMENT], COLUMNS, empty="nothing"))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_line_for_each_where_there_is_room():
    lines = shown(200)
    assert len(lines) == 3
    assert all(output.text_of(value) in lines[1] for value in DOCUMENT.values())


def test_what_clients_wrote_is_shortened_first():
    lines = shown(110)
    assert len(lines) == 3
    for name in ("id", "key", "deliver_at", "state"):
        assert DOCUMENT[name] in lines[1]
    assert lines[1].endswith("…")


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_each_has_lines_of_its_own_where_a_line_is_too_short(width):
    text = "\n".join(shown(width))
    names = [name.replace("_", " ") for name in COLUMNS]
    assert all(text.count(f"{name}  ") == 2 for name in names)
    if width > 50:
        assert text.count(str(DOCUMENT["id"])) == text.count(str(DOCUMENT["deliver_at"])) == 2


def test_a_file_has_no_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    output.make_console().print(output.rows([DOCUMENT], COLUMNS, empty="nothing"))
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["id", "key", "deliver", "at", "state", "body"]
    assert all(output.text_of(value) in line for value in DOCUMENT.values())


def test_nothing_is_a_sentence():
    assert output.rows([], COLUMNS, empty="Nothing waits.") == "Nothing waits."
