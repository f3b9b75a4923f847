"""What cannot be sent to one node is sent to the next one, within the time of the call."""

import asyncio

import pytest

from delayserver.client.errors import UnansweredError, UnreachableError
from delayserver.client.nodes import Nodes
from tests.unit.client.fake_server import LOST, UNREACHABLE, FakeTransport, answer, problem
from tests.waiting import turns

HOME = "http://here:8080"
URLS = ["http://one:8080", "http://two:8080"]


def test_each_is_asked_once_and_the_one_that_answers_first_from_then_on():
    async def main():
        made = {url: FakeTransport(default=lambda *_: answer(200)) for url in (HOME, *URLS)}
        nodes = Nodes(made[HOME], HOME + "/", made.__getitem__)
        assert not nodes.has_others
        await nodes.take([HOME, *URLS])
        assert nodes.has_others

        def counts():
            return [len(one.requests) for one in made.values()]

        made[HOME].replies.append(UNREACHABLE)
        assert (await nodes.request("GET", "/", timeout_s=3)).status == 200
        assert counts() == [1, 1, 0]
        assert made[HOME].timeouts_s == [3] and 0 < made[URLS[0]].timeouts_s[0] <= 3
        await nodes.request("GET", "/")
        assert counts() == [1, 2, 0]
        # What may have been sent is not sent again, but the next call goes to another one.
        made[URLS[0]].replies.append(LOST)
        with pytest.raises(UnansweredError):
            await nodes.request("GET", "/")
        await nodes.request("GET", "/")
        assert counts() == [1, 3, 1]
        made[URLS[1]].replies.append(problem(503))
        assert (await nodes.request("GET", "/")).status == 503
        await nodes.request("GET", "/")
        assert counts() == [2, 3, 2]
        for one in made.values():
            one.replies.append(UNREACHABLE)
        with pytest.raises(UnreachableError):
            await nodes.request("GET", "/")
        assert counts() == [3, 4, 3]
        # Two that find the same one dead go on to the same next one.
        for one in made.values():
            one.replies.clear()
        made[HOME].replies += [UNREACHABLE] * 2
        made[HOME].gate.clear()
        both = [asyncio.create_task(nodes.request("GET", "/")) for _ in range(2)]
        await turns()
        made[HOME].gate.set()
        await asyncio.gather(*both)
        assert counts() == [5, 6, 3]
        await nodes.close()
        assert [one.closed for one in made.values()] == [False, True, True]

    asyncio.run(main())
