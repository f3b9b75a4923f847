"""The tokens of a process follow their file, and the log says once what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.security.tokens import TokenFile
from delayserver.server.token_keeper import TokenKeeper, open_tokens
from delayserver.slices import Slices
from storage.errors import DiskError
from tests.world.storage.files import SimulatedFiles

NOW_MS = 1_800_000_000_000


def test_a_process_that_others_reach_has_a_token() -> None:
    files = SimulatedFiles()
    open_tokens(Settings(), files, Path("here"), NOW_MS)
    outside = Settings(host="0.0.0.0", tls_cert=Path("c"), tls_key=Path("k"))
    with pytest.raises(AccessError, match="--data-dir here"):
        open_tokens(outside, files, Path("here"), NOW_MS)


def test_a_changed_file_is_taken_over_and_one_that_cannot_be_read_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = SimulatedFiles()
    tokens = open_tokens(Settings(), files, Path("here"), NOW_MS)
    slices = Slices(lambda function: None)
    told: list[tuple[str, str, str]] = []
    keeper = TokenKeeper(tokens, slices, lambda: NOW_MS, lambda *what: told.append(what))
    TokenFile(files).create("one", ("admin",), now_ms=NOW_MS, random_bytes=bytes)
    keeper.refresh()
    assert len(tokens) == 1

    def refuse(now_ms: int) -> object:
        raise DiskError("read", "TOKENS", "no")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "refreshing", refuse)
        for _ in range(3):
            keeper.refresh()
    assert len(tokens) == 1
    assert capsys.readouterr().out.count("the tokens stay as they were") == 1
    assert told == []
