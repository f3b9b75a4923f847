"""Single requests by wrk: a closed loop in C, so that the generator is not what is measured.

Each of N connections sends its next request when the last one was answered. What is sent is
written in Lua, to a temporary file: either the same bytes each time, or a key that counts up. wrk
ends while a request of each connection may be on its way: up to N requests are served that it does
not count.

It corrects its percentiles for requests that a stalled server held back (coordinated omission).
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from load import LoadError

THREADS = 1
"""It is not what limits the rates that are measured. With two, three busy threads share two cores:
percentiles show the scheduler then, those of a bare hello as well."""

_HEAD = """
wrk.method = "%(method)s"
wrk.headers["content-type"] = "application/json"
wrk.body = %(body)s
"""

# KEY in the body is replaced: thread and count, at a fixed length, so that the head stays the same.
_KEYED = """
local threads = 0
function setup(thread)
  threads = threads + 1
  thread:set("number", threads)
end
local before, after
local count = 0
function init(arguments)
  local whole = wrk.format(nil, nil, nil, wrk.body)
  local from, to = whole:find("KEY00000000", 1, true)
  before, after = whole:sub(1, from - 1), whole:sub(to + 1)
end
function request()
  count = count %% %(keys)d + 1
  return before .. %(key)s .. after
end
"""
_COUNTED = 'string.format("%02d%09d", number, count)'

# The keys stand in a file, a line each.
_LISTED = """
local listed = {}
for line in io.lines("%(file)s") do
  listed[#listed + 1] = line
end
"""

_DONE = """
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\nFIGURES {"requests": %d, "microseconds": %d, "p50": %d, "p99": %d, "max": %d, ' ..
    '"not_2xx": %d, "broken": %d}\\n',
    summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), latency.max,
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
"""

MISSING = "wrk is not installed. On Debian and Ubuntu: apt-get install wrk"

KEY_PLACE = "KEY00000000"
"""Stands in a body where the key is to be: as long as thread and count are."""


def key_of(thread: int, count: int) -> str:
    """What stands at KEY_PLACE in the request with this number, from 1, of a thread, from 1."""
    return f"{thread:02d}{count:09d}"


@dataclass(frozen=True, slots=True)
class Posts:
    """What wrk counted."""

    requests: int
    rate: float
    """Requests each second."""
    p50_ms: float
    p99_ms: float
    max_ms: float


def is_installed() -> bool:
    """Whether there is a wrk."""
    return shutil.which("wrk") is not None


def post(
    port: int,
    path: str,
    body: bytes,
    connections: int,
    seconds: int,
    *,
    method: str = "POST",
    keys: int = 999_999_999,
    listed: Sequence[str] = (),
) -> Posts:
    """Send `body` over so many connections for so long. Raises LoadError on any failure.

    A body or a path with KEY_PLACE in it gets another key each time (`key_of`); each
    thread begins again after `keys` of them. `listed`: these instead, each as long as KEY_PLACE."""
    assert all(len(key) == len(KEY_PLACE) for key in listed)
    script = _HEAD % {"body": _quote(body), "method": method}
    with (
        tempfile.NamedTemporaryFile("w", suffix=".lua") as file,
        tempfile.NamedTemporaryFile("w", suffix=".keys") as lines,
    ):
        if listed:
            lines.write("\n".join(listed))
            lines.flush()
            script += _LISTED % {"file": lines.name}
            script += _KEYED % {"keys": len(listed), "key": "listed[count]"}
        elif KEY_PLACE.encode() in body or KEY_PLACE in path:
            script += _KEYED % {"keys": keys, "key": _COUNTED}
        file.write(script + _DONE)
        file.flush()
        finished = subprocess.run(
            [
                "wrk",
                f"-t{min(THREADS, connections)}",
                f"-c{connections}",
                f"-d{seconds}s",
                "--timeout=10s",
                f"-s{file.name}",
                f"http://127.0.0.1:{port}{path}",
            ],
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    found = re.search(r"^FIGURES (.*)$", finished.stdout, re.MULTILINE)
    if found is None:
        raise LoadError(f"wrk failed: {finished.stdout}{finished.stderr}")
    figures = json.loads(found[1])
    if figures["not_2xx"] or figures["broken"]:
        raise LoadError(f"not all requests were answered with 2xx: {figures}")
    return Posts(
        requests=figures["requests"],
        rate=figures["requests"] / figures["microseconds"] * 1e6,
        p50_ms=figures["p50"] / 1000,
        p99_ms=figures["p99"] / 1000,
        max_ms=figures["max"] / 1000,
    )


def _quote(data: bytes) -> str:
    """A Lua string."""
    return '"' + "".join(f"\\{byte:03d}" for byte in data) + '"'
