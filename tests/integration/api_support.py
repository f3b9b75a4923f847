"""A real server process on loopback, and a receiver for its webhooks, for the tests of the API."""

import hashlib
import itertools
import queue
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from delayserver.cli.demo.process import free_port
from delayserver.security.tokens import TokenFile
from storage.files import OsFiles
from tests.forked_servers import ForkedServerProcess
from tests.waiting import DEADLINE_S, wait_until

_numbers = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}-{next(_numbers)}"


def time_ms(text: str) -> int:
    """A time of an answer as milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def now_ms() -> int:
    """The clock of this machine."""
    return time.time_ns() // 1_000_000


def make_token(data_dir: Path, name: str, *scopes: str, **options: Any) -> str:
    """A token of a server, by a name; the same name gives the same token."""
    file = TokenFile(OsFiles(str(data_dir)))
    digits = hashlib.sha256(name.encode()).digest()
    _, text = file.create(
        name, scopes, now_ms=now_ms(), random_bytes=lambda length: digits[:length], **options
    )
    return text


class ApiServer(httpx.Client):
    """A server process, and an HTTP client for it."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.settings = settings
        self.data_dir = directory / "data"
        self.tokens: dict[str, str] = {}
        self._log_path = directory / "server.log"
        self.process = ForkedServerProcess(self.data_dir, port=free_port(), log_path=self._log_path)
        super().__init__(base_url=self.process.url, timeout=DEADLINE_S)

    def launch(self, **settings: object) -> None:
        """Start the process; it is not ready yet. `settings` replace those from before."""
        self.settings.update(settings)
        self.process.options = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in self.settings.items()
        ]
        self.process.start()

    def start(self, **settings: object) -> None:
        """Start the process, and wait until it is ready."""
        self.launch(**settings)
        self.process.wait_ready()

    def restart(self, *, kill: bool = False, **settings: object) -> None:
        """End the process, with SIGTERM or with SIGKILL, and start it again."""
        if kill:
            self.process.kill()
        else:
            assert self.process.stop() == 0, self.log
        self.start(**settings)

    def shut_down(self) -> None:
        """End everything."""
        self.close()
        self.process.kill()

    @property
    def log(self) -> str:
        """What the process has logged."""
        return self._log_path.read_text(errors="replace")

    def clear_log(self) -> None:
        """Forget what it has logged."""
        self._log_path.write_text("")

    def metric(self, name: str) -> float:
        """A figure of /metrics that has no labels; where there are shards, of all together."""
        pattern = rf"^delayserver_{name}(?:{{shard=\"\d+\"}})? (\S+)$"
        found = re.findall(pattern, self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    # ── calls that many tests make ─────────────────────────────────────────────────────────────

    def ask(self, method: str, path: str, status: int = 200, **arguments: Any) -> Any:
        """One call; the document of the answer, which has that status."""
        answer = self.request(method, path, **arguments)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def publish(self, subject: str, **message: object) -> dict[str, Any]:
        """Publish a new message."""
        document = {"subject": subject, **message}
        answer: dict[str, Any] = self.ask("POST", "/v1/messages", 201, json=document)
        return answer

    def look_up(self, message_id: str) -> dict[str, Any]:
        """A message."""
        answer: dict[str, Any] = self.ask("GET", f"/v1/messages/{message_id}")
        return answer

    def recorded(self, message_id: str, count: int = 1) -> list[dict[str, Any]]:
        """The deliveries of a message once it is delivered, and so many of them are recorded: the
        results of webhooks are, a moment later, and whatever kills the server does not repeat
        them from then on."""

        def look() -> list[dict[str, Any]]:
            found = self.look_up(message_id)
            is_done = found["state"] == "delivered" and len(found["deliveries"]) >= count
            return list(found["deliveries"]) if is_done else []

        return wait_until(look)

    def subscribe(self, name: str, subject: str, **definition: object) -> str:
        """Make a subscription, which pulls unless a url is given; its path."""
        kind = "webhook" if "url" in definition else "pull"
        path = f"/v1/subscriptions/{name}"
        self.ask("PUT", path, 201, json={"subject": subject, "type": kind, **definition})
        return path

    def pull(self, path: str, **wanted: object) -> list[dict[str, Any]]:
        """Messages of a subscription; waits for the first one."""
        answer = self.ask("POST", f"{path}/pull", json={"wait": "20s", **wanted})
        messages: list[dict[str, Any]] = answer["messages"]
        return messages

    def pull_all(self, path: str, count: int) -> list[dict[str, Any]]:
        """So many messages of a subscription, acknowledged."""
        messages: list[dict[str, Any]] = []
        while len(messages) < count:
            pulled = self.pull(path)
            assert pulled, f"{len(messages)} of {count} messages came"
            messages += pulled
            self.ack(path, *pulled)
        return messages

    def pull_held(self, path: str, count: int) -> dict[str, dict[str, Any]]:
        """So many messages of a subscription by their ids, leased."""
        messages: dict[str, dict[str, Any]] = {}
        while len(messages) < count:
            messages |= {message["id"]: message for message in self.pull(path)}
        return messages

    def ack(self, path: str, *messages: Mapping[str, Any]) -> dict[str, Any]:
        """Acknowledge messages that were pulled."""
        leases = [message["lease"] for message in messages]
        answer: dict[str, Any] = self.ask("POST", f"{path}/ack", json={"leases": leases})
        return answer


@dataclass
class Received:
    """A delivery that came in."""

    path: str
    headers: dict[str, str]
    body: bytes
    at_ms: int
    method: str


@dataclass
class _Hook:
    answers: Iterable[tuple[int, Mapping[str, str], str]]
    takes_s: float = 0.0
    busy: int = 0
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    received: "queue.Queue[Received]" = field(default_factory=queue.Queue)
    gate: threading.Event = field(default_factory=threading.Event)


class Receiver:
    """A webhook receiver. Each hook has a path of its own, and answers as it was told."""

    def __init__(self) -> None:
        self._hooks: dict[str, _Hook] = {}
        hooks = self._hooks

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                hook = hooks[self.path]
                with hook.lock:
                    hook.busy += 1
                    hook.most_busy = max(hook.most_busy, hook.busy)
                    # The first to be seen by `next` gets the first answer, however many come.
                    hook.received.put(Received(self.path, headers, body, now_ms(), self.command))
                    status, extra, text = next(iter(hook.answers))
                hook.gate.wait(DEADLINE_S)
                time.sleep(hook.takes_s)
                with hook.lock:
                    # Before the answer: who gets it may send the next at once.
                    hook.busy -= 1
                answer = text.encode()
                self.send_response(status)
                for name, value in {**extra, "content-length": str(len(answer))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_POST

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        """Let everybody who waits go, and end."""
        for hook in self._hooks.values():
            hook.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def hook(
        self,
        *answers: int | tuple[int, Mapping[str, str]] | tuple[int, Mapping[str, str], str],
        gate: bool = False,
        takes_s: float = 0.0,
    ) -> str:
        """The URL of a new hook, which gives these answers, and the last one again and again.

        `gate`: no answer is given before `open`; `takes_s`: how long it is at work for each."""
        path = "/" + unique("hook")
        parts = [one if isinstance(one, tuple) else (one, {}) for one in answers or (200,)]
        full = [(one[0], one[1], one[2] if len(one) == 3 else "") for one in parts]
        hook = _Hook(itertools.chain(full, itertools.repeat(full[-1])), takes_s)
        if not gate:
            hook.gate.set()
        self._hooks[path] = hook
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def open(self, url: str) -> None:
        """Let a hook answer."""
        self._hooks[httpx.URL(url).path].gate.set()

    def next(self, url: str, timeout_s: float = DEADLINE_S) -> Received:
        """The next delivery that a hook gets."""
        return self._hooks[httpx.URL(url).path].received.get(timeout=timeout_s)

    def all(self, url: str) -> list[Received]:
        """What has come and was not looked at, which stays so."""
        return list(self._hooks[httpx.URL(url).path].received.queue)

    def most_busy(self, url: str) -> int:
        """How many deliveries a hook had at work at once, at most."""
        return self._hooks[httpx.URL(url).path].most_busy

    def count(self, url: str) -> int:
        """Deliveries that came and were not looked at."""
        return self._hooks[httpx.URL(url).path].received.qsize()
