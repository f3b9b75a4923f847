"""Zones: read from this machine's files, and read again when those have changed."""

from __future__ import annotations

import os
import shutil
import zoneinfo
from collections.abc import Iterator
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import pytest

from delayserver.errors import InputError
from delayserver.records import zones
from delayserver.records.zones import FAILED_MAX, check_zone, have_changed, zone_of


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where zones are looked for: Atlantis has the rules of Berlin."""
    before = zoneinfo.TZPATH
    (tmp_path / "Sea").mkdir()
    put(tmp_path, "Europe/Berlin")
    zoneinfo.reset_tzpath([str(tmp_path)])
    zones.forget()
    yield tmp_path
    zoneinfo.reset_tzpath(before)
    zones.forget()


def put(folder: Path, rules: str) -> None:
    """Replace the file as a package does: by another one of that name."""
    (folder / "new").write_bytes(files("tzdata").joinpath("zoneinfo", rules).read_bytes())
    os.replace(folder / "new", folder / "Sea/Atlantis")


def offset_hours(name: str) -> float:
    offset = datetime(2026, 1, 1, tzinfo=zone_of(name)).utcoffset()
    assert offset is not None
    return offset.total_seconds() / 3600


def test_a_zone_is_read_again_when_its_file_is_another_one(folder: Path) -> None:
    assert offset_hours("Sea/Atlantis") == 1
    assert not have_changed()
    put(folder, "America/New_York")
    assert have_changed() and offset_hours("Sea/Atlantis") == 1
    zones.forget()
    assert offset_hours("Sea/Atlantis") == -5
    assert not have_changed()


def test_one_that_is_gone_and_one_that_comes_are_noticed(folder: Path) -> None:
    zone_of("Sea/Atlantis")
    os.rename(folder / "Sea/Atlantis", folder / "away")
    assert have_changed()
    zones.forget()
    with pytest.raises(InputError, match="no time zone that is known here") as caught:
        zone_of("Sea/Atlantis")
    assert caught.value.pointer == "/timezone" and not have_changed()
    os.rename(folder / "away", folder / "Sea/Atlantis")
    assert have_changed()
    zones.forget()
    assert offset_hours("Sea/Atlantis") == 1


@pytest.mark.parametrize("content", [b"", b"TZif", b"TZif2" + bytes(39), b"no zone at all"])
def test_a_file_that_is_none_is_no_zone(content: bytes, folder: Path) -> None:
    (folder / "Sea/Broken").write_bytes(content)
    with pytest.raises(InputError):
        zone_of("Sea/Broken")
    shutil.copy(folder / "Sea/Atlantis", folder / "Sea/Broken")
    assert have_changed()


@pytest.mark.parametrize(
    "name", ["localtime", "Factory", "posixrules", "posix/Europe/Berlin", "right/UTC", "zone.tab"]
)
def test_a_zone_that_means_another_one_on_each_machine_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="Europe/Berlin") as caught:
        check_zone(name)
    assert caught.value.pointer == "/timezone"
    check_zone("US/Eastern")


@pytest.mark.parametrize(
    "name",
    ["", "Europe", "Mars/Base", "/etc/passwd", "../UTC", "CEST", "a\0b", "x" * 5000, "\ud800"],
)
def test_whatever_a_client_writes_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="no time zone"):
        check_zone(name)


def test_names_that_are_none_are_kept_up_to_a_limit() -> None:
    zones.forget()
    for number in range(FAILED_MAX + 9):
        with pytest.raises(InputError):
            zone_of(f"Nowhere/{number}")
    assert len(zones._failed) == FAILED_MAX and not have_changed()
    zones.forget()
