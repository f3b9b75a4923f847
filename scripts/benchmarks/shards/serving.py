"""Servers of several shards that are measured: all of them there, each with the port of its own.

A shard listens at the address of all, where the system chooses who gets a connection, and at a port
of its own. Which ports those are is read in /proc; which shard listens there is said by the id of a
message that is published there. So a benchmark can ask the owner of a key, or somebody else.

Cost: two requests to each shard at its start, one of which publishes.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice
from pathlib import Path

from levels.bench import Bench
from load import LoadConnection, LoadError
from servers import START_MAX_S, BenchmarkError, Served

from delayserver.records.message_id import read_id
from delayserver.records.sharding import shard_of

PROBE_SUBJECT = "bench.probe"
QUIET_MAX_S = 30.0
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Sharded:
    """A server, and where each of its shards listens alone, by its number."""

    served: Served
    ports: list[int]

    @property
    def port(self) -> int:
        """Of all."""
        return self.served.port

    @property
    def count(self) -> int:
        return len(self.ports)

    def cpu_s(self) -> float:
        """Processor time of all its processes."""
        return self.served.cpu_s()

    def accepted(self) -> int:
        """How many messages it has accepted so far, all shards together."""
        accepted: int = self.served.stats()["accepted"]
        return accepted

    def wait_until_filed(self) -> None:
        """Until nothing is left to be filed of what was accepted: what comes next is measured
        without it."""
        deadline = time.monotonic() + QUIET_MAX_S
        while time.monotonic() < deadline:
            if not self.served.stats()["unfiled_bytes"]:
                return
            time.sleep(0.05)
        raise BenchmarkError(f"something was left to be filed after {QUIET_MAX_S:.0f} s")


@contextmanager
def sharded(bench: Bench, name: str, count: int, *options: str) -> Iterator[Sharded]:
    """A server of so many shards, until the block ends; one shard: a server alone."""
    with bench.server(name, "--shards", str(count), *options) as served:
        _wait_for_all(served)
        if count == 1:
            yield Sharded(served, [served.port])
        else:
            ports = {
                _shard_at(port): port
                for pid in served.shards()
                for port in listening_ports(pid) - {served.port}
            }
            assert sorted(ports) == list(range(count)), ports
            yield Sharded(served, [ports[shard] for shard in range(count)])


@dataclass(frozen=True, slots=True)
class Apart:
    """Servers alone, side by side, that know nothing of one another: what the machine lets so many
    processes do, without what makes one server of them."""

    servers: list[Sharded]

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self.servers]

    def cpu_s(self) -> float:
        """Processor time of all of them."""
        return sum(server.cpu_s() for server in self.servers)

    def accepted(self) -> int:
        """How many messages they have accepted so far."""
        return sum(server.accepted() for server in self.servers)

    def wait_until_filed(self) -> None:
        """As one server."""
        for server in self.servers:
            server.wait_until_filed()


Asked = Sharded | Apart


@contextmanager
def apart(bench: Bench, name: str, count: int) -> Iterator[Apart]:
    """So many servers alone, until the block ends."""
    with ExitStack() as stack:
        alone = (sharded(bench, f"{name}-alone-{count}-{number}", 1) for number in range(count))
        yield Apart([stack.enter_context(one) for one in alone])


@contextmanager
def all_sharded(bench: Bench, name: str, counts: tuple[int, ...]) -> Iterator[dict[int, Sharded]]:
    """Servers of so many shards, side by side, until the block ends."""
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(sharded(bench, f"{name}-{count}", count)) for count in counts
        }


def _wait_for_all(served: Served) -> None:
    """Until every shard can be asked: one that is away makes the stats a refusal."""
    deadline = time.monotonic() + START_MAX_S
    while time.monotonic() < deadline:
        try:
            served.stats()
        except (OSError, LoadError):
            time.sleep(0.05)
        else:
            return
    raise BenchmarkError("not all shards were there in time")


def _shard_at(port: int) -> int:
    with LoadConnection(port) as connection:
        message = {"subject": PROBE_SUBJECT, "delay": "1d"}
        return read_id(connection.call("POST", "/v1/messages", message)["id"]).shard


def listening_ports(pid: int) -> set[int]:
    """The ports of IPv4 that a process listens at."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = _SOCKET.fullmatch(os.readlink(descriptor))
        except FileNotFoundError:  # It was closed meanwhile.
            continue
        if found is not None:
            inodes.add(found[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes
    }


def keys_of(shard: int, count: int, subject: str, prefix: str, keys: int) -> list[str]:
    """So many keys that belong to one shard of `count`, all of one length."""
    candidates = (f"{prefix}{number:09d}" for number in numbers())
    mine = (key for key in candidates if shard_of(subject, key, count) == shard)
    return list(islice(mine, keys))
