"""Where webhooks and messages to brokers may go: an allow list, checked by name and by address.

A publisher must not be able to make the server call arbitrary hosts (server-side request forgery).
So a request passes two gates:

    name      `check_url`      when a subscription is made, and again before every attempt
    address   `check_address`  after the name was resolved, before the connection is made

    entry                  name gate                        address gate
    hooks.example.com      this host, any port              public addresses
    hooks.example.com:443  this host, this port             public addresses
    *.example.com          any host below, not example.com  public addresses
    10.0.0.0/8, 10.1.2.3   addresses written in a URL       these addresses, by any listed name
    10.1.2.3:80, [::1]:80  the same, this port              the same, this port

A listed name opens only the public internet. When it resolves to a loopback, private, link-local
(cloud metadata: 169.254.169.254) or otherwise special address, that address has to be listed too:
`worker` and `172.16.0.0/12` for a host of a private network. An empty list allows loopback only, by
the name `localhost` or by address.

DNS rebinding: a name may resolve to a good address when it is checked and to a bad one a moment
later. Therefore the address gate takes the very address that the connection is then made to. The
caller resolves once, checks, and connects to the checked address; it never hands the name to a
client that would resolve it again. For the same reason there is one parser of URLs (`split_url`):
the server connects to its result, and its grammar has no room for two readings. `127.1`, `0x7f.1`,
`2130706433`, backslashes, user names and characters beyond ASCII are refused.

Cost: 3 µs for a URL, 2–10 µs for an address. Threads: immutable. Resolution is the caller's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from delayserver.errors import InputError

LOOPBACK_ONLY = ("localhost", "127.0.0.0/8", "::1")
URL_CHARACTERS_MAX = 2048

# Labels of letters, digits, - and _ (which container networks use); the last one does not begin
# with a digit, so that no reader takes a name for an address.
_NAME_PATTERN = (
    r"(?=.{1,253}(?::|/|\?|$))(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*"
    r"[a-z_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
)
_HOST_PATTERN = rf"{_NAME_PATTERN}|[0-9.]{{7,15}}|\[[0-9a-f:.]{{2,45}}\]"
_URL = re.compile(
    rf"(https?)://({_HOST_PATTERN})(?::([0-9]{{1,5}}))?([/?][!$-;=?-Z\[\]_a-z~]*)?",
    re.ASCII | re.IGNORECASE,  # without ASCII, the Kelvin sign would pass for a k
)
_NAME_ENTRY = re.compile(
    rf"((?:\*\.)?(?:{_NAME_PATTERN}))(?::([0-9]{{1,5}}))?", re.ASCII | re.IGNORECASE
)
_ADDRESS_ENTRY = re.compile(r"(?:([0-9.]+)|\[([0-9a-fA-F:.]+)\]):([0-9]{1,5})")

# The special-purpose registries of IANA. The table is our own, because the set that `ipaddress`
# calls global differs between versions of Python, and includes multicast and addresses that embed
# others.
_IPV4_SPECIAL = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # public in form, yet the metadata service of a large cloud
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
_IPV6_PUBLIC = IPv6Network("2000::/3")
_IPV6_SPECIAL = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL that a connection needs. Equal targets may share connections."""

    scheme: str
    """`http` or `https`; for a broker the scheme of its URL, and `kafka` where it has none."""
    host: str
    """A name in lower case, or an address as `ipaddress` writes it, without brackets."""
    port: int
    is_address: bool
    """Whether `host` is an address: nothing to resolve then."""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORT[self.scheme] else f"{host}:{self.port}"


_DEFAULT_PORT = {"http": 80, "https": 443}


def split_url(url: str) -> tuple[Target, str]:
    """Where to connect, and the request target (path and query). Raises InputError at `/url`."""
    match = _URL.fullmatch(url) if len(url) <= URL_CHARACTERS_MAX else None
    if match is None:
        raise InputError(
            "a webhook URL is http://host[:port]/path or https://…, without user name or fragment, "
            f"at most {URL_CHARACTERS_MAX} characters; write other than ASCII characters percent-"
            "encoded (in the host: as punycode)",
            "/url",
        )
    scheme, host, port_text, path = match.groups()
    scheme = scheme.lower()
    host = host.lower()
    is_address = host[0] == "[" or not _NAME_ENTRY.fullmatch(host)
    if is_address:
        try:
            host = str(IPv6Address(host[1:-1]) if host[0] == "[" else IPv4Address(host))
        except ValueError:
            raise InputError(f"{host} is not an IP address", "/url") from None
    port = int(port_text) if port_text else _DEFAULT_PORT[scheme]
    if not 1 <= port <= 65535:
        raise InputError("a port is 1 to 65535", "/url")
    if path is None or path[0] == "?":
        path = f"/{path or ''}"
    return Target(scheme, host, port, is_address), path


def split_bootstrap(bootstrap: str) -> tuple[Target, ...]:
    """The brokers of `host:port[,host:port…]`. Raises InputError at `/bootstrap`."""
    if len(bootstrap) > URL_CHARACTERS_MAX:
        raise InputError(f"bootstrap has at most {URL_CHARACTERS_MAX} characters", "/bootstrap")
    return tuple(map(split_broker, bootstrap.split(",")))


def split_broker(address: str) -> Target:
    """One broker, `host:port`. Raises InputError at `/bootstrap`."""
    try:
        target, path = split_url(f"http://{address}")
    except InputError:
        target, path = None, ""
    if target is None or path != "/" or not address.rpartition(":")[2].isdigit():
        raise InputError(
            f"{address!r} is not a broker: write host:port, with commas between several",
            "/bootstrap",
        )
    return replace(target, scheme="kafka")


@dataclass(frozen=True, slots=True)
class _NameRule:
    suffix: str
    any_below: bool
    port: int | None

    def admits(self, host: str, port: int) -> bool:
        fits = host.endswith(self.suffix) if self.any_below else host == self.suffix
        return fits and self.port in (None, port)


@dataclass(frozen=True, slots=True)
class _AddressRule:
    network: IPv4Network | IPv6Network
    port: int | None

    def admits(self, address: IPv4Address | IPv6Address, port: int) -> bool:
        return address in self.network and self.port in (None, port)


class TargetPolicy:
    """The allow list. Raises InputError, with the index of the entry, when one cannot be read."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        names: list[_NameRule] = []
        addresses: list[_AddressRule] = []
        for index, entry in enumerate(allowed or LOOPBACK_ONLY):
            rule = _parse_entry(entry, f"/{index}")
            if isinstance(rule, _NameRule):
                names.append(rule)
            else:
                addresses.append(rule)
        self._names = tuple(names)
        self._addresses = tuple(addresses)

    def check_url(self, url: str) -> None:
        """The name gate. Raises InputError at `/url` when the URL cannot be read, or when its host
        and port are not on the list."""
        self.check_target(split_url(url)[0])

    def check_target(self, target: Target) -> None:
        """The name gate for a URL that was split already. Raises InputError at `/url`."""
        if target.is_address:
            self.check_address(target.host, target.port, target.host)
        elif not any(rule.admits(target.host, target.port) for rule in self._names):
            raise InputError(
                f"webhooks to {target.host}:{target.port} are not allowed; the operator may add "
                "the host to webhook_targets",
                "/url",
            )

    def check_broker(self, broker: Target, pointer: str = "/bootstrap") -> None:
        """The name gate for a broker. Raises InputError at `pointer`."""
        try:
            self.check_target(broker)
        except InputError:
            raise InputError(
                f"messages to the broker {broker.host}:{broker.port} are not allowed; the operator "
                "may add the host to webhook_targets",
                pointer,
            ) from None

    def check_address(self, host: str, port: int, ip: str) -> None:
        """The address gate: `ip` is an address that `host` (as in Target) resolved to, and the
        caller connects to it next. Raises InputError at `/url`."""
        address = _plain_address(ip)
        if any(rule.admits(address, port) for rule in self._addresses):
            return
        if host == ip or not _is_public(address):
            via = "" if host == ip else f" ({host})"
            raise InputError(
                f"webhooks to the address {ip}{via}, port {port}, are not allowed; the operator "
                "may add it or its network to webhook_targets",
                "/url",
            )


def _parse_entry(entry: str, pointer: str) -> _NameRule | _AddressRule:
    if match := _NAME_ENTRY.fullmatch(entry):
        name = match[1].lower()
        any_below = name.startswith("*.")
        return _NameRule(name[1:] if any_below else name, any_below, _parse_port(match[2], pointer))
    match = _ADDRESS_ENTRY.fullmatch(entry)
    port = _parse_port(match[3], pointer) if match else None
    text = (match[1] or match[2]) if match else entry
    try:
        return _AddressRule(ip_network(text), port)
    except ValueError:
        raise InputError(
            f"{entry!r} is not a webhook target: write hooks.example.com, *.example.com, "
            "10.0.0.0/8, 10.1.2.3, or any of them but a network with :port",
            pointer,
        ) from None


def _parse_port(text: str | None, pointer: str) -> int | None:
    if text is None:
        return None
    if not 1 <= int(text) <= 65535:
        raise InputError("a port is 1 to 65535", pointer)
    return int(text)


def _plain_address(ip: str) -> IPv4Address | IPv6Address:
    """The address that packets end up at: the IPv4 one, if an IPv6 address embeds one."""
    address = ip_address(ip)
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _IPV4_SPECIAL)
    return address in _IPV6_PUBLIC and not any(address in network for network in _IPV6_SPECIAL)
