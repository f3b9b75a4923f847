"""What is logged holds no control characters, and an exception keeps its lines."""

from __future__ import annotations

import pytest
import structlog

from delayserver.api.logs import escape_controls, set_up_logging
from delayserver.config import Settings


@pytest.fixture(autouse=True)
def as_before():
    yield
    structlog.reset_defaults()


def test_a_log_line_holds_no_control_characters_of_a_client(capsys) -> None:
    set_up_logging(Settings())
    log = structlog.get_logger()
    key = "\x1b[2J\x1b]0;owned\x07 é\r\u202e\x9b1mk\n2026-01-01 [critical] fire"
    log.warning(f"a dead letter {key}", key=key, keys=[key])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert r"\x1b[2J\x1b]0;owned\x07 é\r\u202e\x9b1mk\n2026" in line


def test_an_exception_keeps_its_lines() -> None:
    event = {"event": "a\nb", "exception": "one\n\ttwo\x1b[1m", "count": 1}
    escaped = escape_controls(None, "error", event)
    assert escaped == {"event": r"a\nb", "exception": "one\n\ttwo\\x1b[1m", "count": 1}


def test_lines_for_programs_are_escaped_as_json_is(capsys) -> None:
    set_up_logging(Settings(log_json=True))
    structlog.get_logger().warning("a dead letter", key="\x1b[2J")
    assert r'"key": "\u001b[2J"' in capsys.readouterr().err
