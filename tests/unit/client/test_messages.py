"""Options of messages; tests/unit/client/test_producer.py has the calls."""

import pytest

from delayserver.client import AsyncClient, Draft
from delayserver.client.values import PublishOptions
from tests.unit.client.fake_server import FakeTransport, answer, asynchronous, message_id


@asynchronous
async def test_a_replacement_has_all_options_of_a_message():
    transport = FakeTransport(*[answer(200, {"id": message_id(1)})] * 2)
    messages = AsyncClient(transport=transport).messages
    await messages.replace("s", "k", {"n": 1}, delay="1m", headers={"a": "b"}, on_dead="d")
    await messages.replace("s", "k", b"raw", to="http://a", group="g")
    assert [document for *_, document in transport.requests] == [
        {"body": {"n": 1}, "delay": "1m", "headers": {"a": "b"}, "on_dead": {"subject": "d"}},
        {"body_base64": "cmF3", "to": {"url": "http://a"}, "group": "g"},
    ]


@asynchronous
async def test_an_option_that_is_not_known_is_refused_before_anything_is_sent():
    transport = FakeTransport()
    messages = AsyncClient(transport=transport).messages
    with pytest.raises(TypeError, match=r"no option 'prioritty'; there are .*priority"):
        await messages.publish("s", prioritty=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'debounce'"):
        await messages.publish("s", debounce=1)  # type: ignore[call-arg]
    assert transport.requests == []


def test_a_draft_has_the_arguments_of_publish():
    options = set(PublishOptions.__annotations__)
    assert set(Draft.__struct_fields__) == {"subject", "body", "key"} | options
