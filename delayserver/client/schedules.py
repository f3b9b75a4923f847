"""Schedules: messages that the server publishes again and again.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any, TypedDict, Unpack
from urllib.parse import urlencode

import msgspec

from delayserver.client.cutting import decoded_message
from delayserver.client.definitions import VersionedDefinitions
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import CatchUp, Delay, DeliverAt, Overlap, Published, Schedule
from delayserver.client.writing import content_to_send, options_to_send


class PlanOptions(TypedDict, total=False):
    """The times of a schedule; see `AsyncClientSchedules.put`."""

    cron: str | None
    every: Delay | None
    timezone: str | None
    start_at: DeliverAt | None
    end_at: DeliverAt | None
    max_runs: int | None


class ScheduleOptions(PlanOptions, total=False):
    """Options of a schedule; see `AsyncClientSchedules.put`."""

    jitter: Delay | None
    catch_up: CatchUp | None
    overlap: Overlap | None


class _Planned(msgspec.Struct):
    next_at: tuple[datetime, ...]


class AsyncClientSchedules(VersionedDefinitions[Schedule]):
    """The schedules of a server.

        await client.schedules.put("daily", "report.daily", {"shop": 7}, cron="0 9 * * MON-FRI")

    Durations are timedeltas, text such as "15s", or whole milliseconds; times are datetimes that
    know their zone, text in RFC 3339, or milliseconds since the epoch. A paused schedule publishes
    nothing. When it is resumed, `catch_up` decides about the runs that it has missed. Messages that
    it has published stay when it is deleted."""

    _kind = "schedules"

    async def put(
        self,
        name: str,
        subject: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Make a schedule, or replace it; an option that is not given has its default then.

        - `cron`: five fields with names, six with seconds in front, or "@daily" and the like, on
          the clock of `timezone` (UTC); or `every`, at least a second.
        - `jitter`: each message is due up to so much later.
        - `catch_up`: how runs that were missed during downtime or a pause are made up for: "last"
          (once), "none", "all".
        - `overlap`: "skip" leaves a run out while the message of the one before is not settled.
        - `start_at`, `end_at`, `max_runs`: when it begins, and ends.
        - `if_match`: only if that is its version (`Schedule.version`).

        Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""
        document = {
            "subject": subject,
            **content_to_send(body, headers),
            **options_to_send(ScheduleOptions, options),
        }
        return await self._put(name, document, if_match=if_match, timeout_s=timeout_s)

    async def preview(
        self,
        *,
        subject: str = "preview",
        count: int = 5,
        timeout_s: float | None = None,
        **options: Unpack[PlanOptions],
    ) -> tuple[datetime, ...]:
        """The next `count` times (at most 100) of a schedule that is not made. `subject`: one that
        the token may publish to. Raises InvalidError, NotAllowedError."""
        document = {"subject": subject, **options_to_send(PlanOptions, options)}
        path = f"{path_of('schedules', 'preview')}?{urlencode({'count': count})}"
        answer = await self._client._call("POST", path, document, timeout_s=timeout_s)
        return decoded(answer.body, _Planned).next_at

    def list(self, *, page: int = 100) -> AsyncIterator[Schedule]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._client._pages(path_of("schedules"), "schedules", Schedule, page)

    async def trigger(self, name: str, *, timeout_s: float | None = None) -> Published:
        """Run a schedule now, besides its planned times. Returns the message. Raises NotFoundError.

        UnansweredError after a lost answer: a second request would run it twice."""
        path = path_of("schedules", name, "trigger")
        answer = await self._client._call("POST", path, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, Published)

    def _read(self, answer: HttpAnswer) -> Schedule:
        schedule = decoded_message(answer.body, Schedule)
        return msgspec.structs.replace(schedule, version=answer.version)
