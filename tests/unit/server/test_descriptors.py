"""The budget of descriptors: what fits is left alone, what does not is divided or refused."""

from __future__ import annotations

import random
import resource

import pytest

from delayserver.config import Settings
from delayserver.errors import InputError
from delayserver.recovery.store import WRITTEN_HOURS_MIN
from delayserver.server import descriptors
from delayserver.server.descriptors import (
    LEFT_MIN,
    OWN_MIN,
    SCHEDULE_HOURS_MAX,
    divided,
    within_limit,
)
from storage.hour_log import HourLog
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(connections_max=300, webhook_connections_max=100)


def test_what_fits_stays_as_it_is() -> None:
    budget = divided(SETTINGS, OWN_MIN + 400)
    assert budget.settings is SETTINGS
    assert budget.schedule_hours_max == WRITTEN_HOURS_MIN


@pytest.mark.parametrize(
    ("allowed", "hours"),
    [
        # Connections come first.
        (OWN_MIN + LEFT_MIN, WRITTEN_HOURS_MIN),
        (OWN_MIN + 400 + 7, WRITTEN_HOURS_MIN + 7),
        # Half of all.
        (4 * OWN_MIN, 2 * OWN_MIN),
        (10_000, 5_000),
        (2 * SCHEDULE_HOURS_MAX - 2, SCHEDULE_HOURS_MAX - 1),
        (1 << 20, SCHEDULE_HOURS_MAX),
    ],
)
def test_the_schedule_log_has_what_is_left(allowed: int, hours: int) -> None:
    assert divided(SETTINGS, allowed).schedule_hours_max == hours


def test_much_is_left_for_the_schedule_log_only_where_connections_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = Settings(connections_max=100_000, webhook_connections_max=1000)
    limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (512, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    budget = within_limit(many)
    assert (budget.settings, budget.schedule_hours_max) == (many, SCHEDULE_HOURS_MAX)
    limit = OWN_MIN + 101_000 + 5
    budget = within_limit(many)
    assert (budget.settings, budget.schedule_hours_max) == (many, WRITTEN_HOURS_MIN + 5)


@pytest.mark.parametrize(
    ("left", "connections", "webhooks"),
    [
        (399, 300, 99),
        (380, 285, 95),
        # Not all is taken from the webhooks: a quarter stays theirs.
        (300, 225, 75),
        (LEFT_MIN, 24, 8),
    ],
)
def test_a_limit_that_is_too_small_is_divided(left: int, connections: int, webhooks: int) -> None:
    settings = divided(SETTINGS, OWN_MIN + left).settings
    assert (settings.connections_max, settings.webhook_connections_max) == (connections, webhooks)


def test_a_server_that_could_serve_nobody_does_not_start() -> None:
    with pytest.raises(InputError, match=rf"allows .* {OWN_MIN + LEFT_MIN - 1} open files.*raise"):
        divided(SETTINGS, OWN_MIN + LEFT_MIN - 1)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (512, 100_000, 2 * SCHEDULE_HOURS_MAX, 300),
        (512, resource.RLIM_INFINITY, 2 * SCHEDULE_HOURS_MAX, 300),
        (512, 5_000, 5_000, 300),
        (100_000, 100_000, None, 300),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 300),
        (512, OWN_MIN + 200, OWN_MIN + 200, 150),
    ],
)
def test_the_limit_is_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append(limits))
    assert within_limit(SETTINGS).settings.connections_max == connections
    assert set_to == ([] if raised is None else [(raised, hard)])


def test_all_logs_of_hours_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HourLog] = []
    original = HourLog.__init__

    def init(self: HourLog, *arguments: object, **named: object) -> None:
        original(self, *arguments, **named)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(HourLog, "__init__", init)
    SimulatedServer(
        Settings(),
        SimulatedFiles(),
        MemoryCatalog(),
        SimulatedClock(),
        random.Random(0),
        Observer(),
    )
    files = sum(log._open_files_max + 1 for log in made)
    assert files + descriptors._OTHERS_MAX == OWN_MIN
