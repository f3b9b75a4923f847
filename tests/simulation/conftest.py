"""What the tests of damaged directories share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def in_memory() -> Iterator[Path]:
    """Hundreds of small directories are made; what a sync costs is not the subject here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)
