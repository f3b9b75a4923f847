"""Schedules: messages that the server publishes again and again.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import msgspec

from delayserver.client.cutting import decoded_message, decoded_page
from delayserver.client.definitions import DefinitionsClient
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import CatchUp, Delay, DeliverAt, Overlap, Published, Schedule
from delayserver.client.writing import duration_or_none, fields, given, new_message, time_or_none


class _List(msgspec.Struct):
    schedules: list[Schedule]
    cursor: str | None = None


class _Planned(msgspec.Struct):
    next_at: tuple[datetime, ...]


class AsyncSchedules(DefinitionsClient[Schedule]):
    """The schedules of a server, for asyncio.

        async with AsyncSchedules("http://127.0.0.1:8080") as schedules:
            await schedules.put("daily", "report.daily", {"shop": 7}, cron="0 9 * * MON-FRI")

    Durations are timedeltas, text such as "15s", or whole milliseconds; times are datetimes that
    know their zone, text in RFC 3339, or milliseconds since the epoch."""

    _kind = "schedules"

    async def put(
        self,
        name: str,
        subject: str,
        body: Any = None,
        *,
        cron: str | None = None,
        every: Delay | None = None,
        timezone: str | None = None,
        headers: Mapping[str, str] | None = None,
        jitter: Delay | None = None,
        catch_up: CatchUp | None = None,
        overlap: Overlap | None = None,
        start_at: DeliverAt | None = None,
        end_at: DeliverAt | None = None,
        max_runs: int | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> Schedule:
        """Make a schedule, or change it: what is not given has its default then.

        - `cron`: five fields with names, six with seconds in front, or "@daily" and the like, on
          the clock of `timezone` (UTC); or `every`, at least a second.
        - `jitter`: each message is due up to so much later.
        - `catch_up`: what was missed during downtime or a pause: "last" (once), "none", "all".
        - `overlap`: "skip" leaves a run out while the message of the one before is not settled.
        - `start_at`, `end_at`, `max_runs`: when it begins, and ends.
        - `if_match`: only if that is its version (`Schedule.version`).

        Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""
        document = {
            **fields(new_message(subject, body, headers=headers)),
            **_times(subject, cron, every, timezone, start_at, end_at, max_runs),
            "jitter": duration_or_none(jitter),
            "catch_up": catch_up,
            "overlap": overlap,
        }
        return await self._put(name, document, timeout_s, if_match)

    async def preview(
        self,
        *,
        cron: str | None = None,
        every: Delay | None = None,
        timezone: str | None = None,
        start_at: DeliverAt | None = None,
        end_at: DeliverAt | None = None,
        max_runs: int | None = None,
        subject: str = "preview",
        count: int = 5,
        timeout_s: float | None = None,
    ) -> tuple[datetime, ...]:
        """The next `count` times (at most 100) of a schedule that is not made. `subject`: one that
        the token may publish to. Raises InvalidError, NotAllowedError."""
        document = given(_times(subject, cron, every, timezone, start_at, end_at, max_runs))
        path = f"{path_of('schedules', 'preview')}?{urlencode({'count': count})}"
        answer = await self._call("POST", path, document, timeout_s=timeout_s)
        return decoded(answer.body, _Planned).next_at

    async def get(self, name: str, *, timeout_s: float | None = None) -> Schedule:
        """A schedule, when it runs next, and what it has done. Raises NotFoundError."""
        return await self._get(name, timeout_s)

    def list(self, *, page: int = 100) -> AsyncIterator[Schedule]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._pages(path_of("schedules"), {"limit": str(page)}, _read_page)

    async def pause(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Schedule:
        """Publish nothing until it is resumed. Raises NotFoundError, ChangedError."""
        return await self._post(name, "pause", timeout_s, if_match)

    async def resume(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Schedule:
        """Publish again; `catch_up` says what becomes of what it has missed. Raises
        NotFoundError, ChangedError."""
        return await self._post(name, "resume", timeout_s, if_match)

    async def trigger(self, name: str, *, timeout_s: float | None = None) -> Published:
        """Run it now, besides its planned times; the message. Raises NotFoundError.

        A lost answer is an UnansweredError: asked again, it would run twice."""
        path = path_of("schedules", name, "trigger")
        answer = await self._call("POST", path, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, Published)

    async def delete(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> None:
        """End a schedule: when this returns, it never runs again. Its messages stay.
        Raises NotFoundError, ChangedError."""
        await self._end(name, timeout_s, if_match)

    def _read(self, answer: HttpAnswer) -> Schedule:
        schedule = decoded_message(answer.body, Schedule)
        return msgspec.structs.replace(schedule, version=answer.version)


def _read_page(body: bytes) -> tuple[list[Schedule], str | None]:
    page = decoded_page(body, _List, "schedules", Schedule)
    return page.schedules, page.cursor


def _times(
    subject: str,
    cron: str | None,
    every: Delay | None,
    timezone: str | None,
    start_at: DeliverAt | None,
    end_at: DeliverAt | None,
    max_runs: int | None,
) -> dict[str, Any]:
    return {
        "subject": subject,
        "cron": cron,
        "every": duration_or_none(every),
        "timezone": timezone,
        "start_at": time_or_none(start_at),
        "end_at": time_or_none(end_at),
        "max_runs": max_runs,
    }
