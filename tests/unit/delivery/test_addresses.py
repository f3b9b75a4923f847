"""Which address of a broker's name is connected to."""

import asyncio
import socket
import threading
from functools import partial
from typing import Any

import pytest

from delayserver.delivery import addresses
from delayserver.delivery.addresses import checked_address
from delayserver.delivery.outlet import OutletError
from delayserver.errors import InputError
from delayserver.http.connecting import connect_to_any
from delayserver.security.targets import Target, TargetPolicy

POLICY = TargetPolicy(("broker.example", "127.0.0.0/8"))


def found(*known: str, port: int = 1, policy: TargetPolicy = POLICY) -> str:
    target = Target("amqp", "broker.example", port, is_address=False)
    return asyncio.run(checked_address(policy, target, lambda host, port: list(known)))


def test_one_address_is_not_tried() -> None:
    assert found("127.0.0.1") == found("127.0.0.1", "127.0.0.1") == "127.0.0.1"


def test_addresses_that_are_not_allowed_are_left_out() -> None:
    assert found("10.0.0.1", "127.0.0.2") == "127.0.0.2"
    with pytest.raises(InputError):
        found("10.0.0.1")
    with pytest.raises(InputError, match="has no address"):
        found()


def test_the_first_that_takes_a_connection_is_chosen() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        assert found("127.0.0.1", "127.0.0.2", port=port) == "127.0.0.2"
    with pytest.raises(OutletError, match="none of 2 addresses"):
        found("127.0.0.1", "127.0.0.2", port=port)


def test_one_that_hangs_costs_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    connect = asyncio.open_connection

    async def attempt(address: str, port: int) -> Any:
        tried.append(address)
        if address == "127.0.0.1":
            await asyncio.Event().wait()
        return await connect(address, port)

    monkeypatch.setattr(asyncio, "open_connection", attempt)
    soon = partial(connect_to_any, head_start_s=0.01)
    monkeypatch.setattr(addresses, "connect_to_any", soon)
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        assert found("127.0.0.1", "127.0.0.2", "127.0.0.3", port=port) == "127.0.0.2"
    assert tried == ["127.0.0.1", "127.0.0.2"]


def test_a_name_server_that_hangs_holds_no_thread_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.05)
    gate = threading.Event()
    target = Target("amqp", "broker.example", 1, is_address=False)

    def hang(host: str, port: int) -> list[str]:
        gate.wait(30)
        return []

    async def main() -> None:
        waiting = [checked_address(POLICY, target, hang) for _ in range(40)]
        results = await asyncio.gather(
            *waiting, asyncio.to_thread(lambda: 7), return_exceptions=True
        )
        assert results.pop() == 7
        assert {type(one) for one in results} == {OutletError}
        gate.set()

    asyncio.run(main())


def test_a_name_that_nobody_knows() -> None:
    def refuse(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    target = Target("amqp", "broker.example", 1, is_address=False)
    with pytest.raises(OutletError, match=r"cannot resolve broker\.example: no such name"):
        asyncio.run(checked_address(POLICY, target, refuse))
