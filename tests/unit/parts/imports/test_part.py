"""Imports and archives, as the core is told of them."""

from delayserver.config import Settings
from delayserver.parts.imports.archives import Archives
from delayserver.parts.imports.imports import Imports
from delayserver.parts.imports.part import ARCHIVES_PART, IMPORTS_PART
from tests.unit.fakes import HOUR, Disk
from tests.unit.parts.imports.machine import LATER, Machine


def test_the_overlays_are_held_while_an_import_is_decided(machine: Machine) -> None:
    holds, imports = IMPORTS_PART.holds, machine.server.engine.part(Imports)
    assert holds is not None and not holds(imports)
    machine.stage("a", *LATER)
    machine.adopt("a")
    assert holds(imports)
    machine.rest()
    assert not holds(imports)


def test_an_hour_is_kept_for_an_archive_if_the_setting_says_so() -> None:
    assert ARCHIVES_PART.keep is not None
    for archive in (False, True):
        disk = Disk()
        replay = disk.replay
        filing = (disk.catalog, replay.hours, disk.dispatch, replay.effects, replay.checkpoint)
        keeper = ARCHIVES_PART.keep(Settings(archive=archive), *filing)
        assert isinstance(keeper, Archives)
        assert keeper.lets_go(HOUR) is not archive
