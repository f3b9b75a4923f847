"""Who makes schedules in the simulation, in three of ten worlds.

Their luck is their own, so that what else happens in a world does not depend on them.

Threads: none.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from delayserver.errors import DelayServerError
from delayserver.parts.schedules.records import CatchUp, Overlap
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule
from delayserver.records.message import Payload
from delayserver.server.engine import Engine
from storage.rows import HOUR_MS
from tests.world.schedule_records import ScheduleRecords

NAMES: Final = ("s1", "s2", "s3")
SUBJECTS: Final = ("orders.paid", "misc")
CRONS: Final = ("*/10 * * * *", "@hourly", "30 59 * * * *", "0 2 * * *")

Act = Callable[[Engine, ScheduleRecords], None]


class Schedulers:
    """Everybody who makes, changes, pauses, resumes, runs and deletes schedules."""

    def __init__(
        self,
        seed: str,
        counts: Counter[str],
        ask: Callable[[str, Act], None],
        periods_ms: Sequence[int] = (20_000, 600_000, HOUR_MS),
    ) -> None:
        """`periods_ms`: what `every` may be. `ask`: calls what it is given with the server that has
        a schedule of that name, and with what is durable there; or not, if none is."""
        self._luck = random.Random(f"schedules {seed}")
        self._is_there = self._luck.random() < 0.3
        self._counts = counts
        self._periods_ms = periods_ms
        self._ask = ask

    def maybe_act(self, now_ms: int) -> None:
        """Now and then one of them does something."""
        luck = self._luck
        if not self._is_there or luck.random() >= 0.12:
            return
        name, do = luck.choice(NAMES), self._choice()
        self._ask(name, lambda engine, records: self._act(engine, records, name, do, now_ms))

    def _choice(self) -> str:
        weights = {"put": 5, "pause": 1, "resume": 2, "trigger": 1, "delete": 0.5}
        return self._luck.choices(tuple(weights), tuple(weights.values()))[0]

    def _act(
        self, engine: Engine, records: ScheduleRecords, name: str, do: str, now_ms: int
    ) -> None:
        schedules = engine.part(Scheduling)
        try:
            match do:
                case "put":
                    schedules.put(self._wanted(name, now_ms), now_ms)
                case "pause":
                    schedules.pause(name, now_ms)
                case "resume":
                    schedules.resume(name, now_ms)
                case "trigger":
                    records.triggered[name] += 1
                    schedules.trigger(name, now_ms)
                case _:
                    schedules.delete(name)
        except DelayServerError:
            return
        self._counts[f"schedules {do}"] += 1

    def _wanted(self, name: str, now_ms: int) -> WantedSchedule:
        """One of few, so that many are put that are there."""
        luck = self._luck
        cron = luck.choice(("", *CRONS))
        every_ms = 0 if cron else luck.choice(self._periods_ms)
        # After a jump of the clock by hours, all would be very many.
        is_rare = bool(cron) or every_ms >= 600_000
        body = f'"{name} {luck.randrange(2)}"'.encode()
        return WantedSchedule(
            name,
            luck.choice(SUBJECTS),
            Payload(body),
            cron,
            every_ms,
            "Europe/Berlin",
            jitter_ms=luck.choice((0, 0, 500)),
            catch_up=luck.choice(tuple(CatchUp) if is_rare else (CatchUp.LAST, CatchUp.NONE)),
            overlap=luck.choice(tuple(Overlap)),
            start_ms=luck.choice((None, None, now_ms + 300)),
            runs_max=luck.choice((None, None, 5)),
        )


def end_schedules(engine: Engine, records: ScheduleRecords) -> None:
    """Delete all of them: a server that has some never comes to rest."""
    for name in records.known.copy():
        engine.part(Scheduling).delete(name)
