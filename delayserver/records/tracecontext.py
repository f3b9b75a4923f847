"""Trace context (W3C, Level 1): the headers `traceparent` and `tracestate` of a publish.

They go along with the message as headers of its own, so that a webhook carries them and a pull
shows them. A malformed header is ignored, as the standard asks. They are no part of a message's
content: the same message sent again, in another span, is the same message.

Cost: 0.3 µs for a request without them. Threads: pure.
"""

import re
from collections.abc import Iterable, Mapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACESTATE_MAX = 512
TRACE_NAMES = (TRACEPARENT, TRACESTATE)

Trace = Mapping[str, str]
"""The headers, `traceparent` at least."""

_TRACEPARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    rb"(?P<more>-[!-~]*)?"
)
_TRACESTATE = re.compile(rb"[!-~]([ -~]*[!-~])?")


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
    """The trace context of a request with these headers (lower-case names); None without one."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    found = _TRACEPARENT.fullmatch(parents[0].strip())
    if found is None or (found["version"] == b"00" and found["more"] is not None):
        return None
    trace = {TRACEPARENT: found[0].decode()}
    # One list, however many headers it came in.
    state = b",".join(value.strip() for name, value in headers if name == b"tracestate")
    if len(state) <= TRACESTATE_MAX and _TRACESTATE.fullmatch(state):
        trace[TRACESTATE] = state.decode()
    return trace


def in_trace(headers: Mapping[str, str], trace: Trace, *, max_bytes: int) -> Mapping[str, str]:
    """The headers of a message in another trace than that which they name."""
    others = {name: value for name, value in headers.items() if name.lower() not in TRACE_NAMES}
    return with_trace(others, trace, max_bytes=max_bytes) or headers


def with_trace(
    headers: Mapping[str, str] | None, trace: Trace, *, max_bytes: int
) -> dict[str, str] | None:
    """The headers of a message with its trace context; None if it has its own, or they would be
    longer than that in all."""
    if headers and any(name.lower() in TRACE_NAMES for name in headers):
        return None
    merged = {**(headers or {}), **trace}
    size_bytes = sum(len(name) + len(value) for name, value in merged.items())
    return merged if size_bytes <= max_bytes else None
