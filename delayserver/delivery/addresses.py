"""To which address a connection to a broker is made: one that the allow list has seen.

The name is resolved here, each address goes through `TargetPolicy.check_address`, and the client is
given one address. A certificate still has to be for the name.

A name may have several addresses, of which some are away. The first that takes a connection is
chosen (`delayserver.http.connecting`, in the order of the resolver), and the connection that shows
it is closed again. Where there is one address, the client finds out by itself.

Cost: a thread for each look-up, of its own (`delayserver.delivery.own_threads`), and a connection
more where a name has several addresses. Threads: belongs to the event loop.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from delayserver.delivery.outlet import OutletError
from delayserver.delivery.own_threads import in_own_thread
from delayserver.errors import InputError
from delayserver.http.connecting import connect_to_any
from delayserver.security.targets import Target, TargetPolicy

CONNECT_S: Final = 3.0
ADDRESSES_MAX: Final = 8
RESOLVE_S: Final = 10.0

Resolve = Callable[[str, int], list[str]]
"""The addresses of a name, in a thread. Raises OSError."""


def resolve_by_system(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order of the resolver; blocks. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def checked_address(
    policy: TargetPolicy, target: Target, resolve: Resolve = resolve_by_system
) -> str:
    """An allowed address of a host that takes connections, as far as that is known.

    Raises InputError where none is allowed, and OutletError where the name cannot be resolved or
    no address takes a connection."""
    policy.check_broker(target, "/url")
    if target.is_address:
        return target.host
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await in_own_thread(
                "delayserver-broker-name", resolve, target.host, target.port
            )
    except OSError as error:  # TimeoutError is one.
        reason = str(error) or f"no answer within {RESOLVE_S:.0f} s"
        raise OutletError(f"cannot resolve {target.host}: {reason}") from error
    refusal = InputError(f"{target.host} has no address", "/url")
    allowed: list[str] = []
    for address in dict.fromkeys(found):
        try:
            policy.check_address(target.host, target.port, address)
            allowed.append(address)
        except InputError as error:
            refusal = error
    if not allowed:
        raise refusal
    if len(allowed) == 1:
        return allowed[0]
    return await _first_that_answers(target, allowed[:ADDRESSES_MAX])


async def _first_that_answers(target: Target, addresses: list[str]) -> str:
    async def connect(address: str) -> asyncio.StreamWriter:
        async with asyncio.timeout(CONNECT_S):
            return (await asyncio.open_connection(address, target.port))[1]

    try:
        address, writer = await connect_to_any(addresses, connect, asyncio.StreamWriter.close)
    except OSError as error:
        reason = str(error) or f"no answer within {CONNECT_S:.0f} s"
        raise OutletError(
            f"none of {len(addresses)} addresses of {target.host}: {reason}"
        ) from error
    writer.close()
    return address
