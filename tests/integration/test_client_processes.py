"""The client library in programs that fork, and errors on their way between processes."""

import os
import subprocess
import sys

import pytest

from tests.integration.api_support import unique

FORKED_ASYNC = r"""
import asyncio, os, sys
from delayserver.client import AsyncClient
client = AsyncClient(sys.argv[1])

async def work():
    for _ in range(2):
        published = await client.messages.publish(sys.argv[2], delay="1h")
        os.write(1, f"{published.id}\n".encode())  # whole, however many write
    await client.close()

for _ in range(2):
    if not os.fork():
        asyncio.run(work())
        os._exit(0)
statuses = [os.wait()[1] for _ in range(2)]
asyncio.run(work())
sys.exit(any(statuses))
"""

ONE_LOOP_AFTER_THE_OTHER = r"""
import asyncio, sys
from delayserver.client import AsyncClient
client = AsyncClient(sys.argv[1])
for _ in range(3):
    print(asyncio.run(client.messages.publish(sys.argv[2], delay="1h")).id)
asyncio.run(client.close())
"""

FORKED_BLOCKING = r"""
import os, signal, sys
from delayserver.client import Client
client = Client(sys.argv[1])

def work():
    os.write(1, f"{client.messages.publish(sys.argv[2], delay='1h').id}\n".encode())

work()
if not os.fork():
    signal.alarm(30)  # a child that hangs is ended by it
    work()
    work()
    client.close()
    os._exit(0)
status = os.wait()[1]
work()
client.close()
sys.exit(status != 0)
"""

RAISED_IN_A_POOL = """
import multiprocessing, sys
from delayserver.client import Client, NotFoundError

def job(url):
    with Client(url) as client:
        return client.messages.get("no such message")

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply_async(job, (sys.argv[1],)).get(timeout=60)
        except NotFoundError as error:
            print(error.status, flush=True)
"""


def run(program, *arguments):
    """A program of its own, since a process with threads of pytest's is none to be forked."""
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("program", "count"), [(FORKED_ASYNC, 6), (FORKED_BLOCKING, 4)])
def test_a_producer_that_was_made_before_a_fork_serves_both_sides(
    shared_api, tmp_path, program, count
):
    """Each publish is a message of its own: generated keys are not used twice. Nobody hangs."""
    (tmp_path / "program.py").write_text(program)
    ids = run(tmp_path / "program.py", shared_api.process.url, unique("forked"))
    assert len(set(ids)) == len(ids) == count


def test_a_producer_serves_one_event_loop_after_the_other(shared_api, tmp_path):
    """The connections of the one before are of no use: that loop is closed."""
    (tmp_path / "program.py").write_text(ONE_LOOP_AFTER_THE_OTHER)
    ids = run(tmp_path / "program.py", shared_api.process.url, unique("loops"))
    assert len(set(ids)) == 3


def test_an_error_reaches_the_parent_of_a_pool(shared_api, tmp_path):
    (tmp_path / "program.py").write_text(RAISED_IN_A_POOL)
    assert run(tmp_path / "program.py", shared_api.process.url) == ["404"]
