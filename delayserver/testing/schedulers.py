"""Who makes schedules in the simulation. Threads: none."""

import random
from typing import Final

from delayserver.decisions.scheduling import WantedSchedule
from delayserver.errors import DelayServerError
from delayserver.records.message import Payload
from delayserver.records.schedules import CatchUp, Overlap
from delayserver.testing.actor import Actor
from storage.rows import HOUR_MS

NAMES: Final = ("s1", "s2", "s3")
SUBJECTS: Final = ("orders.paid", "misc")
CRONS: Final = ("*/10 * * * *", "@hourly", "30 59 * * * *", "0 2 * * *")


class Schedulers(Actor):
    """Who makes schedules, in some worlds. Their luck is their own, so that what else happens in a
    world does not depend on it."""

    luck = random.Random(0)

    def begin_world(self, seed: int) -> None:
        """Whether there are any in this world."""
        self.luck = random.Random(f"schedules {seed}")
        self.is_there = self.luck.random() < 0.3
        self._body_count = 0

    def maybe_act(self) -> None:
        """Now and then somebody makes, changes, pauses, resumes, runs or deletes a schedule."""
        if self.is_there and self.luck.random() < 0.12:
            self._act()

    def _act(self) -> None:
        luck, now_ms = self.luck, self._clock.now_ms
        schedules, name = self._server.engine.schedules, luck.choice(NAMES)
        do = luck.choices(
            ("put", "pause", "resume", "trigger", "delete"), weights=(5, 1, 2, 1, 0.5)
        )[0]
        try:
            match do:
                case "put":
                    schedules.put(self._wanted(name), now_ms)
                case "pause":
                    schedules.pause(name)
                case "resume":
                    schedules.resume(name, now_ms)
                case "trigger":
                    self._ledger.schedules.triggered[name] += 1
                    schedules.trigger(name, now_ms)
                case _:
                    schedules.delete(name)
        except DelayServerError:
            return
        self._counts[f"schedules {do}"] += 1

    def _wanted(self, name: str) -> WantedSchedule:
        """One of few, so that many are put that are there."""
        luck, now_ms = self.luck, self._clock.now_ms
        cron = luck.choice(("", *CRONS))
        every_ms = 0 if cron else luck.choice((20_000, 600_000, HOUR_MS))
        # After a jump of the clock by hours, all would be very many.
        is_rare = every_ms != 20_000
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

    def end_all(self) -> None:
        """Delete all of them: a server that has some never comes to rest."""
        for name in self._ledger.schedules.known.copy():
            self._server.engine.schedules.delete(name)
