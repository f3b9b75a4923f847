"""The process of a shard: what it is told, it serves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from delayserver.cluster.membership import Membership
from delayserver.config import Settings
from delayserver.serve import process, shard
from delayserver.serve.reporting import EXIT_REFUSED
from delayserver.shards.place import ShardPlace
from storage.replicated.meta import make_identity

PLACE = ShardPlace(1, 3, Path("data"), Path("sockets"))


class Input:
    """Standard input, from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a pipe whose other end is standard input."""
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stdin", Input(reading))
    yield writing
    gc.enable()
    os.close(reading)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was to be served."""
    served: list[tuple[Any, ...]] = []

    def serve(*what: object) -> int:
        assert not gc.isenabled()  # for the imports; the wiring turns it on
        served.append(what)
        return 0

    monkeypatch.setattr(process, "serve", serve)
    return served


def test_what_it_is_told_it_serves(said: int, served: list[tuple[Any, ...]]) -> None:
    settings = Settings(data_dir=Path("data/shard-1"), port=8081, retention_ms=7)
    os.write(said, shard.order(settings, PLACE, None) + b'{"type": "a line behind it"}\n')
    os.close(said)
    assert shard.main() == 0
    assert served == [(settings, PLACE, None, b'{"type": "a line behind it"}\n')]


def test_one_of_a_cluster_is_told_so(said: int, served: list[tuple[Any, ...]]) -> None:
    membership = Membership("n1", 1, make_identity("c", 3, "fsync", Random(7).randbytes))
    os.write(said, shard.order(Settings(), PLACE, membership))
    os.close(said)
    assert shard.main() == 0
    assert served == [(Settings(), PLACE, membership, b"")]


def test_where_nobody_tells_it_anything_it_ends(said: int) -> None:
    os.close(said)
    assert shard.main() == EXIT_REFUSED
