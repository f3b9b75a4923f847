"""The logs of a server on its own: they stand in its directory, as its settings say."""

from pathlib import Path

import pytest

from delayserver.config import Settings
from delayserver.recovery.openers import OWN_DIRECTORY
from storage.directory import Identity, open_identity
from storage.hour_log import HourLog
from storage.message_log import MessageLog
from storage.rows import LogKind
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles


def identity_of(files: SimulatedFiles) -> Identity:
    return open_identity(files, random_bytes=lambda count: b"r" * count)


@pytest.mark.parametrize(("ships_log", "held_bytes"), [(False, 0), (True, 1 << 20)])
def test_the_message_log_holds_bytes_only_where_it_is_shipped(
    tmp_path: Path, ships_log: bool, held_bytes: int
) -> None:
    files = SimulatedFiles()
    settings = Settings(
        data_dir=tmp_path / "data",
        backup_dir=tmp_path / "backups",
        backup_log_ms=1000 if ships_log else 0,
        backup_log_held_max_bytes=1 << 20,
    )
    assert settings.ships_log == ships_log
    log = OWN_DIRECTORY.message_log(files, MemoryCatalog(), identity_of(files), settings)
    assert isinstance(log, MessageLog) and log._held_max_bytes == held_bytes


def test_the_settler_tells_no_other_replica() -> None:
    files = SimulatedFiles()
    identity = identity_of(files)
    dispatch = HourLog(files, LogKind.DISPATCH, stamp=identity.stamp)
    settler = OWN_DIRECTORY.settler(dispatch, MemoryCatalog(), identity)
    assert not settler.is_shared and settler.hours() == []
