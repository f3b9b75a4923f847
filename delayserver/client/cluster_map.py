"""The map of a cluster as clients read it, and which of its addresses they may use.

Cost: 20 µs to read one of 16 shards. Threads: values and functions.
"""

from typing import Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec

CLUSTER_PATH: Final = "/v1/cluster"
MAP_S: Final = 5.0
"""A server that takes longer for the map is not well."""

OwnerHosts = Literal["same", "any", "none"]
"""Whose addresses are used of those that a map names."""


class MapShard(msgspec.Struct):
    """A shard, and who owns it."""

    shard: int
    state: str
    owner: str | None = None
    """The name of its node."""
    url: str | None = None
    epoch: int = 0


class MapNode(msgspec.Struct):
    """A node, which takes any call."""

    url: str


class ShardOwners(msgspec.Struct):
    """The answer of GET /v1/cluster."""

    version: int
    shards: list[MapShard]
    nodes: list[MapNode] = []


def is_allowed(home: str, url: str, hosts: OwnerHosts) -> bool:
    """Whether a token that is for the address `home` may be sent to `url`, because a server says
    so: to the same host only, unless `hosts` is "any", and never in clear text instead of TLS."""
    try:
        here, there = urlsplit(home), urlsplit(url)
        more = there.port == 0 or there.path or there.query or there.fragment or there.username
    except ValueError:
        return False
    if more or not (url.isascii() and there.hostname and there.scheme == here.scheme):
        return False
    return hosts == "any" or (hosts == "same" and there.hostname == here.hostname)


def check_hosts(hosts: OwnerHosts) -> None:
    """Raises ValueError."""
    if hosts not in get_args(OwnerHosts):
        raise ValueError(f'owner_hosts is "same", "any" or "none", and not {hosts!r}')
