"""Where the parts of a run stand, and the network between them, which can be cut.

    clients, receiver ─┐
    n1  n2  n3 ────────┼── one bridge; each has a network namespace and an address of its own
    b1  b2  b3 ────────┘

`scripts/chaos` starts the run in namespaces of its own (network, processes, mounts), so nothing of
the machine is touched, and the kernel removes all of it with the last process. The neighbour that
is cut off has a hardware address that nobody has: what is sent to it gets lost, in one direction or
both, without any answer, as behind a switch that has failed. Connections stay open, and go on when
the cut has healed.

Where there are no namespaces (no root, a container that forbids them) all stand on the loopback,
and there are no cuts.

Cost: 3 ms a cut. Threads: the methods block; one at a time.

Rejected: proxies. A client of Kafka goes to where the brokers say that they are, so each node would
need listeners of its own at each broker; a proxy that stops closes or holds connections, but loses
no packets; and whoever delivers could not be told by its address. Rejected, too: routes that drop
(`blackhole`): whoever sends is told at once.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

CLIENTS: Final = "clients"
VARIABLE: Final = "CHAOS_STAGE"
"""Set by `scripts/chaos` where the process has namespaces of its own."""
_NAMES: Final = Path("/run/netns")
_NOBODY: Final = "02:00:00:00:00:99"
_BRIDGE: Final = "chaos"


class Stage:
    """All on the loopback."""

    can_cut = False
    host = "127.0.0.1"
    """Where the clients are, and what they receive webhooks at."""

    def host_of(self, name: str) -> str:
        """The address of a node or a broker."""
        return "127.0.0.1"

    def name_of(self, host: str) -> str | None:
        """Whose address it is; None: that cannot be told."""
        return None

    def within(self, name: str) -> tuple[str, ...]:
        """What a process there is started through."""
        return ()

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """What one of a pair sends to the other gets lost from now on."""
        raise NotImplementedError("there is no network to be cut")

    def heal(self) -> None:
        """Nothing gets lost any more."""

    def small_disk(self, directory: Path, size_bytes: int) -> None:
        """Give a directory a file system of its own."""
        raise NotImplementedError("nothing may be mounted")


class NetworkStage(Stage):
    """One namespace for each; the process stands in one that nobody else needs."""

    can_cut = True
    host = "10.77.0.1"

    def __init__(self, nodes: Sequence[str], brokers: Sequence[str]) -> None:
        self._hosts = {CLIENTS: self.host}
        self._hosts |= {name: f"10.77.0.{10 + k}" for k, name in enumerate(nodes, 1)}
        self._hosts |= {name: f"10.77.0.{20 + k}" for k, name in enumerate(brokers, 1)}
        self._cuts: set[tuple[str, str]] = set()
        _NAMES.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "none", str(_NAMES))
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{self.host}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for name in (*nodes, *brokers):
            self._add(name)

    def _add(self, name: str) -> None:
        within = ("ip", "-n", name)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", name, "master", _BRIDGE, "up")
        _run(*within, "address", "add", f"{self._hosts[name]}/24", "dev", "eth0")
        _run(*within, "link", "set", "eth0", "up")
        _run(*within, "link", "set", "lo", "up")

    def host_of(self, name: str) -> str:
        return self._hosts[name]

    def name_of(self, host: str) -> str | None:
        return next((name for name, its in self._hosts.items() if its == host), None)

    def within(self, name: str) -> tuple[str, ...]:
        return ("nsenter", f"--net={_NAMES / name}")

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for sender, receiver in pairs:
            self._cuts.add((sender, receiver))
            nobody = ("lladdr", _NOBODY, "nud", "permanent")
            self._neighbour("replace", sender, receiver, nobody)

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            self._neighbour("delete", sender, receiver)
        self._cuts.clear()

    def _neighbour(self, what: str, sender: str, receiver: str, rest: tuple[str, ...] = ()) -> None:
        at_clients = sender == CLIENTS
        within = ("ip",) if at_clients else ("ip", "-n", sender)
        device = _BRIDGE if at_clients else "eth0"
        _run(*within, "neighbour", what, self._hosts[receiver], *rest, "dev", device)

    def small_disk(self, directory: Path, size_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(directory))


def make_stage(nodes: Sequence[str], brokers: Sequence[str]) -> Stage:
    """What this process may have. A process has one at most."""
    return NetworkStage(nodes, brokers) if os.environ.get(VARIABLE) else Stage()


def both_ways(one: Iterable[str], other: Iterable[str]) -> list[tuple[str, str]]:
    """Each of these with each of those, and back."""
    forth = [(a, b) for a in one for b in other]
    return forth + [(b, a) for a, b in forth]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
