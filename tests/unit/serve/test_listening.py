"""Where clients connect: a port that is taken is named, and who shares one does so on purpose."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from delayserver.config import Settings
from delayserver.serve.listening import bind, listen, url_of


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with bind(Settings(port=0)) as first:
        listen(Settings(port=0), first)
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*another --port"):
            bind(Settings(port=port))


def test_who_was_quicker_is_seen_when_it_is_listened() -> None:
    with bind(Settings(port=0)) as first:
        port = first.getsockname()[1]
        settings = Settings(port=port)
        with bind(settings) as second:  # SO_REUSEADDR: nobody listens yet
            listen(settings, first)
            with pytest.raises(OSError, match="cannot listen"):
                listen(settings, second)


def test_some_listen_on_one_port_where_all_share_it() -> None:
    with bind(Settings(port=0), shares=True) as first:
        settings = Settings(port=first.getsockname()[1])
        with bind(settings, shares=True) as second:
            listen(settings, first)
            listen(settings, second)
            assert url_of(second, is_https=False) == f"http://127.0.0.1:{settings.port}"


def test_the_address_of_a_socket_is_one_for_a_browser() -> None:
    class Listener:
        def getsockname(self) -> tuple[str, int, int, int]:
            return "::1", 8080, 0, 0  # of IPv6, which not every machine has

    listener = cast(socket.socket, Listener())
    assert url_of(listener, is_https=True) == "https://[::1]:8080"
