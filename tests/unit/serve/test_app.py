"""Rest: an application that is made some time after the start, and asked meanwhile."""

import asyncio
import subprocess
import sys
import threading

from delayserver.serve.app import Rest
from tests.waiting import turns


async def ask(app):
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "http"}, None, send)
    return sent


class Making:
    """Makes an application when it is let, and counts."""

    def __init__(self, error=None):
        self.count = 0
        self.may_end = threading.Event()
        self.error = error

    def __call__(self):
        self.count += 1
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error

        async def app(scope, receive, send):
            await send("served")

        return app


def test_calls_wait_until_it_is_made_and_it_is_made_once():
    making = Making()
    failures: list[BaseException] = []

    async def run():
        rest = Rest(making, failures.append)
        rest.begin()
        rest.begin()
        asked = [asyncio.ensure_future(ask(rest)) for _ in range(3)]
        await turns()
        assert not any(one.done() for one in asked)
        # One who goes away takes it from nobody.
        asked[0].cancel()
        making.may_end.set()
        served = await asyncio.gather(*asked[1:])
        return [*served, await ask(rest)]

    assert asyncio.run(run()) == [["served"]] * 3
    assert (making.count, failures) == (1, [])


def test_it_is_made_when_it_is_first_asked():
    making = Making()
    making.may_end.set()

    async def run():
        rest = Rest(making, lambda error: None)
        assert making.count == 0
        return await ask(rest)

    assert asyncio.run(run()) == ["served"]


def test_it_is_made_after_some_time_if_nobody_asks(monkeypatch):
    making = Making()
    making.may_end.set()

    async def run():
        timers = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer))
        rest = Rest(making, lambda error: None)
        rest.begin_within(7)
        ((seconds, begin),) = timers
        assert (seconds, making.count) == (7, 0)
        await begin()
        assert making.count == 1
        return await ask(rest)

    assert asyncio.run(run()) == ["served"]
    assert making.count == 1


def test_it_is_made_once_where_somebody_asks_before_that_time(monkeypatch):
    making = Making()
    making.may_end.set()

    async def run():
        timers = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer))
        rest = Rest(making, lambda error: None)
        rest.begin_within(7)
        served = await ask(rest)
        ((_, begin),) = timers
        await begin()
        return served

    assert asyncio.run(run()) == ["served"]
    assert making.count == 1


def test_an_error_is_told_to_whoever_runs_the_server():
    error = ImportError("no such module")
    failures: list[BaseException] = []
    making = Making(error)
    making.may_end.set()

    async def run():
        rest = Rest(making, failures.append)
        try:
            await rest.begin()
        except ImportError:
            await turns()

    asyncio.run(run())
    assert failures == [error]


def test_a_start_imports_nothing_that_only_the_rest_needs():
    """It is two fifths of the imports: one line at the head of a module would bring it all back."""
    program = (
        "import sys; from delayserver.cli import make_app; make_app(['serve']); "
        "import delayserver.serve.process; print(*{name.split('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(found.stdout.split())
    assert "delayserver" in imported
    assert imported.isdisjoint({"fastapi", "starlette", "httpx", "markdown_it", "pyspark"})
