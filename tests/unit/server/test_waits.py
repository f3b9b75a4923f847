"""What is waited for: an error of a thread is that of the future."""

from __future__ import annotations

import pytest

from storage.errors import DamageError
from tests.unit.server.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_an_error_of_the_reader_is_that_of_the_call(machine: Machine) -> None:
    def fail(reader: object) -> None:
        raise DamageError("a file", 0, "rotten")

    with pytest.raises(DamageError):
        machine.wait(lambda: machine.calls.read(fail))
