"""Lines hold no control characters, have one form wherever they come from, and never raise."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from delayserver.config import Settings
from delayserver.serve.logs import escape_controls, finish_logging, set_up_logging

ROOT = Path(__file__).parents[3]
DRAIN_S = 20.0
OF_PEOPLE = (
    "cli",
    "client",
    "console",
    "examples",
    "integrations",
    "pipeline",
    "timers",
)
"""Folders whose modules print, or log as the program does that imports them."""
_WRITES = re.compile(r"\bprint\(|\bsys\.std(?:err|out)\b|\bStreamHandler\b|\bbasicConfig\b")
WRITERS = ("serve/logs.py", "serve/reporting.py", "log_writer.py", "__main__.py")


class Capture:
    """Reads the lines on standard error."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def set_up(self, **settings: Any) -> None:
        set_up_logging(Settings(**settings))
        self.log = structlog.get_logger("a", {})

    def lines(self) -> list[str]:
        finish_logging(DRAIN_S)
        return self._capfd.readouterr().err.splitlines()

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def capture(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Capture]:
    for owner, name in (
        (sys, "stderr"),
        (sys, "unraisablehook"),
        (threading, "excepthook"),
        (logging.root, "handlers"),
        (logging.root, "level"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(logging.root, "handlers", [])
    yield Capture(capfd)
    finish_logging(DRAIN_S)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_a_log_line_holds_no_control_characters_of_a_client(capture: Capture) -> None:
    capture.set_up()
    key = "\x1b[2J\x1b]0;owned\x07 é\r\u202e\x9b1mk\n2026-01-01 [critical] fire"
    capture.log.warning(f"a dead letter {key}", key=key, keys=[key])
    (line,) = capture.lines()
    assert line.isprintable()
    assert r"\x1b[2J\x1b]0;owned\x07 é\r\u202e\x9b1mk\n2026" in line


def test_an_exception_keeps_its_lines() -> None:
    event = {"event": "a\nb", "exception": "one\n\ttwo\x1b[1m", "count": 1}
    escaped = escape_controls(None, "error", event)
    assert escaped == {"event": r"a\nb", "exception": "one\n\ttwo\\x1b[1m", "count": 1}


def test_lines_for_programs_are_escaped_as_json_is(capture: Capture) -> None:
    capture.set_up(log_json=True)
    capture.log.warning("a dead letter", key="\x1b[2J")
    (line,) = capture.lines()
    assert r'"key": "\u001b[2J"' in line


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no text of it")

    __str__ = __repr__


@pytest.mark.parametrize("log_json", [True, False])
def test_a_value_that_cannot_be_shown_raises_nothing(capture: Capture, *, log_json: bool) -> None:
    capture.set_up(log_json=log_json)
    capture.log.error("a strange value", value=Unshowable())
    logging.getLogger("library").error("odd %d", "text")
    logging.getLogger("library").error("odd %s", Unshowable())
    text = "\n".join(capture.lines())
    assert "error: a strange value (the rest cannot be shown: RuntimeError)" in text
    assert "no text of it" in text and "Logging error" in text


def test_what_libraries_and_python_itself_say_has_the_same_form(capture: Capture) -> None:
    capture.set_up(log_json=True)

    def fail() -> None:
        raise KeyError("of a thread")

    class Finalized:
        def __del__(self) -> None:
            raise KeyError("of a finalizer")

    logging.getLogger("uvicorn.error").error("of uvicorn")
    logging.getLogger("asyncio").error("of asyncio")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("of Python", UserWarning, stacklevel=1)
    thread = threading.Thread(target=fail, name="worker")
    thread.start()
    thread.join()
    del thread
    Finalized()
    documents = capture.documents()
    assert all(one["timestamp"] for one in documents)
    said = [(one["level"], one["event"].splitlines()[0]) for one in documents]
    assert said[:2] == [("error", "of uvicorn"), ("error", "of asyncio")]
    assert said[2][0] == "warning" and said[2][1].endswith("UserWarning: of Python")
    assert said[3:] == [
        ("error", "an exception has ended a thread"),
        ("error", "an exception could not be raised"),
    ]
    assert documents[3]["thread"] == "worker"
    assert "KeyError: 'of a thread'" in documents[3]["exception"]
    assert "KeyError: 'of a finalizer'" in documents[4]["exception"]


def test_what_was_lost_is_told_in_the_same_form(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.set_up(log_json=True)
    real = os.write
    monkeypatch.setattr(sys.stderr, "_system_write", lambda descriptor, data: real(-1, data))
    capture.log.error("lost")
    finish_logging(DRAIN_S)
    monkeypatch.setattr(sys.stderr, "_system_write", real)
    capture.log.error("kept")
    told, kept = capture.documents()
    assert (told["level"], told["event"], told["count"]) == (
        "error",
        "lines of the log were lost",
        1,
    )
    assert kept["event"] == "kept"


def test_a_log_that_is_closed_is_no_file_of_the_server(tmp_path: Path) -> None:
    """The next file that is opened would get the number 2, and the lines."""
    program = (
        "import os, sys\n"
        "os.closerange(0, 3)\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        "from delayserver.serve.logs import finish_logging, set_up_logging\n"
        "from delayserver.config import Settings\n"
        "set_up_logging(Settings())\n"
        f"file = open({str(tmp_path / 'data')!r}, 'wb')\n"
        "import structlog\n"
        "structlog.get_logger().error('a line')\n"
        "finish_logging(20)\n"
        "os._exit(0 if file.fileno() > 2 else 1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert (ended.returncode, (tmp_path / "data").read_bytes()) == (0, b"")


def test_nothing_else_of_a_server_writes_to_its_standard_streams() -> None:
    """Whatever does would wait for the reader of the log, and raise when it has ended."""
    found = []
    for path in sorted((ROOT / "delayserver").rglob("*.py")):
        name = str(path.relative_to(ROOT / "delayserver"))
        if name in WRITERS or name.split("/", maxsplit=1)[0] in OF_PEOPLE:
            continue
        found += [f"{name}: {text}" for text in _WRITES.findall(path.read_text())]
    assert found == []
