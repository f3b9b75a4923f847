"""A machine on which tables are staged and adopted."""

import pytest

from tests.unit.parts.imports.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()
