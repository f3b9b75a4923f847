"""Makes the directory of a released version that its successors must open, by that version itself:

    git archive TAG | tar -x -C OLD
    python -m tests.golden.released OLD tests/golden/released-0.1.0.tar.gz

A server of the code in OLD is asked over HTTP for one of everything, and then killed: so the
message log has an end that is not filed, and a delivery is under way. `expected.json` beside the
data says what a look-up of each message has to find. Times are as they were on that day; who opens
it sets the clock to `now_ms`.

Cost: some seconds. Threads: one.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from delayserver.cli.demo.process import free_port
from tests.waiting import wait_until

OPTIONS = ("--segment-bytes=16384", "--checkpoint-ms=200", "--file-ms=100", "--retention-ms=30d")


def main(old: Path, target: Path) -> None:
    """The script."""
    directory = Path(tempfile.mkdtemp()) / "data"
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "delayserver", "serve"),
            *(f"--port={port}", f"--data-dir={directory}", *OPTIONS),
        ],
        cwd=old,
        env={**os.environ, "PYTHONPATH": str(old)},
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        wait_until(lambda: _is_ready(client), what="a server that accepts messages")
        expected = fill(client)
    process.kill()
    process.wait()
    (directory / "LOCK").unlink()
    (directory / "expected.json").write_text(json.dumps(expected, indent=1))
    with tarfile.open(target, "w:gz") as tar:
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory).as_posix()
            if path.is_file() and not path.name.startswith(("spare", "lock.mdb")):
                tar.add(path, name, filter=_anonymous)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def fill(client: httpx.Client) -> dict[str, Any]:
    """One of everything; what becomes of it."""

    def ask(method: str, path: str, document: Any = None) -> Any:
        answer = client.request(method, path, json=document)
        assert answer.status_code < 300, (method, path, answer.text)
        return answer.json() if answer.content else None

    def publish(name: str, **message: Any) -> str:
        found = ask("POST", "/v1/messages", {"subject": "order.unpaid", "body": name, **message})
        states[name] = (found["id"], "scheduled")
        return str(found["id"])

    def became(name: str, state: str) -> None:
        states[name] = (states[name][0], state)

    states: dict[str, tuple[str, str]] = {}
    ask("PUT", "/v1/subscriptions/worker", {"subject": "done.*", "type": "pull", "lease": "1h"})
    hook = {"subject": "refused.*", "type": "webhook", "url": "http://127.0.0.1:9/"}
    retry = {"max_attempts": 1, "backoff": ["1h"]}
    ask("PUT", "/v1/subscriptions/refuses", {**hook, "retry": retry})
    publish("delivered", subject="done.a")
    publish("leased", subject="done.b")
    pulled = ask("POST", "/v1/subscriptions/worker/pull", {"max": 2, "wait": "5s"})["messages"]
    acked = next(one["lease"] for one in pulled if one["subject"] == "done.a")
    ask("POST", "/v1/subscriptions/worker/ack", {"leases": [acked]})
    became("delivered", "delivered")
    became("leased", "delivering")
    publish("dead", subject="refused.a")
    publish("plain", delay="2h")
    publish("with key", key="k1", delay="3h", headers={"x-shop": "7"})
    publish("far", delay="300d")
    ask("DELETE", f"/v1/messages/{publish('cancelled', delay='2h')}")
    became("cancelled", "cancelled")
    ask("PATCH", f"/v1/messages/{publish('moved', delay='2h')}", {"delay": "50h"})
    publish("watched", delay="2h", watch=["order:1"], on_event="cancel")
    ask("POST", "/v1/events/order:1")
    became("watched", "cancelled")
    ask(
        "PUT",
        "/v1/heartbeats/probe",
        {"timeout": "2h", "subject": "probe.silent", "body": {"probe": 1}},
    )
    batch = [{"subject": "bulk", "body": n, "delay": f"{n + 1}h"} for n in range(50)]
    ids = ask("POST", "/v1/messages/batch", batch)["ids"]
    states.update({f"batch {n}": (one, "scheduled") for n, one in enumerate(ids)})
    dead = f"/v1/messages/{states['dead'][0]}"
    wait_until(lambda: ask("GET", dead)["state"] == "dead", what="a dead letter")
    became("dead", "dead")
    time.sleep(1)
    # Behind the last checkpoint: what is accepted, and not filed when it is killed.
    publish("unfiled", key="k2", delay="2h")
    return {"now_ms": time.time_ns() // 1_000_000, "states": states}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
