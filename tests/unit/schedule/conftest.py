"""A disk, and a log that writes to it."""

from __future__ import annotations

import pytest

from tests.unit.fakes import Disk, Log


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def log() -> Log:
    return Log()
