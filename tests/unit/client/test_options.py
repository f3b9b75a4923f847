"""Options of a client, and consumers that are made without one."""

from typing import Any

import pytest

from delayserver.client.following import Following
from delayserver.client.options import ClientConfig, ClientOptions, options_of_consumer
from tests.unit.client.fake_server import FakeTransport


def test_the_options_of_a_client_have_defaults_and_nothing_else() -> None:
    assert set(ClientOptions.__annotations__) | {"url"} == set(ClientConfig.__struct_fields__)


def test_any_node_is_followed_unless_a_test_has_one_transport() -> None:
    transport = FakeTransport()
    assert ClientConfig(transport=transport).any_node() is transport
    assert isinstance(
        ClientConfig(transport=transport, connect=lambda _: transport).any_node(), Following
    )
    assert isinstance(ClientConfig().any_node(), Following)


def test_hosts_of_owners_are_one_of_three_words() -> None:
    hosts: Any = "all"
    with pytest.raises(ValueError, match="owner_hosts is"):
        ClientConfig(owner_hosts=hosts)


def test_a_consumer_without_a_client_gets_both_kinds_of_options() -> None:
    options = {"token": "t", "concurrency": 3}
    with pytest.warns(DeprecationWarning, match=r"Consumer\(…\) ends .* use Client\(…\)\.consumer"):
        reach, own = options_of_consumer("Client", "http://a", options)
        named = options_of_consumer("Client", "", {"url": "http://a", **options})
    assert named == (reach, own) == (ClientConfig("http://a", token="t"), {"concurrency": 3})
    assert options_of_consumer("Client", reach, own) == (reach, own)
