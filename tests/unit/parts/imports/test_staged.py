"""The check of a directory knows the staged files that are still needed, and the others."""

from __future__ import annotations

from delayserver.recovery.check import check
from storage import staging
from storage.check import Severity
from tests.unit.parts.imports.machine import LATER, Machine


def test_check_knows_what_was_staged(machine: Machine) -> None:
    machine.stage("left", *LATER)
    (note,) = check(machine.disk, machine.catalog).findings
    assert (note.severity, note.file) == (Severity.NOTE, "imports/left")
    assert "--id left" in note.reason
    staging.delete(machine.disk, "left")
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    assert check(machine.disk, machine.catalog).findings == []
    last_seq = machine.ledger.durable_seq
    file = machine.disk.open("imports/a.0.part")
    byte = file.pread(1, 70)
    file.pwrite([b"x"], 70)
    (damage,) = check(machine.disk, machine.catalog).damage
    assert (damage.file, damage.first_seq, damage.last_seq) == (
        "imports/a.0.part",
        last_seq - 3,
        last_seq,
    )
    file.pwrite([byte], 70)
    machine.rest()
    assert check(machine.disk, machine.catalog).findings == []
