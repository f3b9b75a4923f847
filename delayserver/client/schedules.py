"""Schedules: messages that the server publishes again and again.

Cost: one request per call. Threads: belongs to the event loop.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

import msgspec

from delayserver.client.calling import RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.cutting import decoded_message, decoded_page
from delayserver.client.following import followed
from delayserver.client.nodes import Connect
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import (
    TIMEOUT_S,
    HttpAnswer,
    HttpTransport,
    Transport,
    decoded,
    path_of,
)
from delayserver.client.values import (
    CatchUp,
    Delay,
    DeliverAt,
    Overlap,
    Published,
    Schedule,
    duration,
    time,
)
from delayserver.client.writing import fields, new_message


class _List(msgspec.Struct):
    schedules: list[Schedule]
    cursor: str | None = None


class _Planned(msgspec.Struct):
    next_at: tuple[datetime, ...]


class AsyncSchedules(RetryingClient):
    """The schedules of a server, for asyncio.

        async with AsyncSchedules("http://127.0.0.1:8080") as schedules:
            await schedules.put("daily", "report.daily", {"shop": 7}, cron="0 9 * * MON-FRI")

    - `retry`: how long to ask again while the server is away; a minute by default.
    - `timeout_s`: how long one request may take. Each call takes a `timeout_s`, too, for all of its
      requests: UnansweredError when that is over.
    - `owner_hosts`: of a cluster any node is asked, when the one at `url` cannot be reached. Those
      are asked that are on the same host as `url`; on any, with "any": then the token goes wherever
      the server says. With "none" only `url` is.
    - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
      tests.

    Durations are timedeltas, text such as "15s", or whole milliseconds; times are datetimes that
    know their zone, text in RFC 3339, or milliseconds since the epoch."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        make = partial(HttpTransport, token=token, tls=tls)
        asked = followed(transport, connect, make, url, owner_hosts)
        super().__init__(url, retry=retry, timeout_s=timeout_s, transport=asked, time=time)

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
        document = _document(
            subject,
            body,
            cron,
            every,
            timezone,
            headers,
            jitter,
            catch_up,
            overlap,
            start_at,
            end_at,
            max_runs,
        )
        answer = await self._call(
            "PUT", path_of("schedules", name), document, if_match=if_match, timeout_s=timeout_s
        )
        return _schedule(answer)

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
        document = _document(
            subject,
            None,
            cron,
            every,
            timezone,
            None,
            None,
            None,
            None,
            start_at,
            end_at,
            max_runs,
        )
        path = f"{path_of('schedules', 'preview')}?{urlencode({'count': count})}"
        answer = await self._call("POST", path, document, timeout_s=timeout_s)
        return decoded(answer.body, _Planned).next_at

    async def get(self, name: str, *, timeout_s: float | None = None) -> Schedule:
        """A schedule, when it runs next, and what it has done. Raises NotFoundError."""
        answer = await self._call("GET", path_of("schedules", name), timeout_s=timeout_s)
        return _schedule(answer)

    async def list(self, *, page: int = 100) -> AsyncIterator[Schedule]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        query = {"limit": str(page)}
        while True:
            answer = await self._call("GET", f"{path_of('schedules')}?{urlencode(query)}")
            found = decoded_page(answer.body, _List, "schedules", Schedule)
            for schedule in found.schedules:
                yield schedule
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def pause(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Schedule:
        """Publish nothing until it is resumed. Raises NotFoundError, ChangedError."""
        return await self._post(name, "pause", if_match, timeout_s)

    async def resume(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Schedule:
        """Publish again; `catch_up` says what becomes of what it has missed. Raises
        NotFoundError, ChangedError."""
        return await self._post(name, "resume", if_match, timeout_s)

    async def trigger(self, name: str, *, timeout_s: float | None = None) -> Published:
        """Run it now, besides its planned times; the message. Raises NotFoundError.

        A lost answer is an UnansweredError: asked again, it would run twice."""
        path = path_of("schedules", name, "trigger")
        answer = await self._call("POST", path, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, Published)

    async def delete(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> None:
        """End a schedule: when this returns, it never runs again. What it has published stays.
        Raises NotFoundError, ChangedError."""
        path = path_of("schedules", name)
        if if_match is None:
            await self._delete(path, timeout_s)
        else:
            await self._call("DELETE", path, if_match=if_match, timeout_s=timeout_s)

    async def _post(
        self, name: str, what: str, if_match: str | None, timeout_s: float | None
    ) -> Schedule:
        path = path_of("schedules", name, what)
        return _schedule(await self._call("POST", path, if_match=if_match, timeout_s=timeout_s))


def _schedule(answer: HttpAnswer) -> Schedule:
    version = answer.headers.get("etag", "").strip('"')
    return msgspec.structs.replace(decoded_message(answer.body, Schedule), version=version)


def _document(
    subject: str,
    body: Any,
    cron: str | None,
    every: Delay | None,
    timezone: str | None,
    headers: Mapping[str, str] | None,
    jitter: Delay | None,
    catch_up: CatchUp | None,
    overlap: Overlap | None,
    start_at: DeliverAt | None,
    end_at: DeliverAt | None,
    max_runs: int | None,
) -> dict[str, Any]:
    document = {
        **fields(new_message(subject, body, headers=headers)),
        "subject": subject,
        "cron": cron,
        "every": None if every is None else duration(every),
        "timezone": timezone,
        "jitter": None if jitter is None else duration(jitter),
        "catch_up": catch_up,
        "overlap": overlap,
        "start_at": None if start_at is None else time(start_at),
        "end_at": None if end_at is None else time(end_at),
        "max_runs": max_runs,
    }
    return {name: value for name, value in document.items() if value is not None}
