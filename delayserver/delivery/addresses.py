"""To which address a connection to a broker is made: one that the allow list has seen.

The name is resolved here, each address goes through `TargetPolicy.check_address`, and the client is
given the address. The name stays what a certificate has to be for.

Cost: a thread of the loop's pool for each look-up. Threads: belongs to the event loop.
"""

import asyncio
import socket

from delayserver.delivery.outlets import OutletError
from delayserver.errors import InputError
from delayserver.security.targets import Target, TargetPolicy


async def checked_address(policy: TargetPolicy, target: Target) -> str:
    """The first address of a host that is allowed.

    Raises InputError where none is, and OutletError where the name cannot be resolved."""
    policy.check_broker(target, "/url")
    if target.is_address:
        return target.host
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            target.host, target.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise OutletError(f"cannot resolve {target.host}: {error}") from error
    refusal = InputError(f"{target.host} has no address", "/url")
    for address in dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found):
        try:
            policy.check_address(target.host, target.port, address)
            return address
        except InputError as error:
            refusal = error
    raise refusal
