"""Ports for servers that a process starts, kills and starts again."""

import socket
from pathlib import Path

import pytest

from delayserver.cli.demo import process
from delayserver.cli.demo.process import free_ports, is_free

CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_connection_of_a_client_can_have_them() -> None:
    first_of_clients = int(CLIENTS.read_text().split()[0])
    for _ in range(50):
        assert 1024 < free_ports(3) <= first_of_clients - 3


def test_whoever_asks_again_before_it_listens_gets_others() -> None:
    assert len({free_ports(1) for _ in range(20)}) > 1


def test_all_of_them_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 20_000
    offered = iter((taken, taken - 1, taken + 1))

    class Offers:
        """Instead of chance."""

        def randrange(self, first: int, last: int) -> int:
            return next(offered)

    monkeypatch.setattr(process, "_ports", Offers())
    monkeypatch.setattr(process, "is_free", lambda port: port != taken)
    assert free_ports(2) == taken + 1


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as listener:
        port = free_ports(1)
        assert is_free(port)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
