"""Nothing is imported by a server that runs: an import needs a descriptor, and may find none.

With PYTHONPROFILEIMPORTTIME the interpreter itself writes a line for each module that it imports.
"""

import re
from typing import Any

from tests.integration.api_support import unique
from tests.waiting import wait_until

IMPORTED = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
HOUR_MS = 3_600_000
RETRIES = {"retry": {"backoff": ["1ms"], "max_attempts": 2}}


def tour(api, receiver):
    """Calls of all kinds, good ones and bad ones, and what comes of them."""
    name, dead = unique("tour"), unique("dead")
    refusing = receiver.hook(503)
    taking = receiver.hook().replace("127.0.0.1", "localhost")
    for one, url in ((dead, refusing), (unique("taken"), taking)):
        hook = {"subject": name, "type": "webhook", "url": url, **RETRIES}
        api.ask("PUT", f"/v1/subscriptions/{one}", 201, json=hook)
    path = api.subscribe(name, name)
    api.publish(name, body={"a": 1}, key="k", watch=["w"])
    api.publish(name, delay="9d", watch=["w"], on_event="fire")
    messages = [{"subject": name, "delay": f"{hour}h"} for hour in range(3)]
    api.ask("POST", "/v1/messages/batch", json=messages)
    api.ask("POST", "/v1/messages?ack=filed", 201, json={"subject": name, "delay": "1h"})
    api.pull_all(path, 2)
    for url in (refusing, refusing, taking):
        receiver.next(url)
    letters = f"/v1/subscriptions/{dead}/dead-letters"
    [letter, *_] = wait_until(lambda: api.ask("GET", letters)["dead_letters"])
    api.post(f"{letters}/{letter['id']}/redrive")
    later = api.publish(name, delay=2 * HOUR_MS)["id"]
    api.ask("PATCH", f"/v1/messages/{later}", json={"delay": 3 * HOUR_MS})
    api.delete(f"/v1/messages/{later}")
    api.ask("POST", "/v1/events/w")
    heartbeat = {"subject": name, "timeout": "1s", "body": "alarm"}
    api.put(f"/v1/heartbeats/{name}", json=heartbeat).raise_for_status()
    api.pull_all(path, 2)
    for body in (b"", b"{}", b"[]", b"{", b"\xff", b'{"subject": 1, "delay": "soon"}', b"\x81"):
        for kind in ("application/json", "application/msgpack", "text/plain"):
            api.post("/v1/messages", content=body, headers={"content-type": kind})
            api.put(f"/v1/subscriptions/{name}", content=body, headers={"content-type": kind})
    for (method, template), operation in operations(api).items():
        wanted = {one["name"]: "1" for one in operation.get("parameters", ())}
        query = {n: v for n, v in wanted.items() if f"{{{n}}}" not in template}
        filled = re.sub(r"\{\w+\}", name, template)
        asked: list[dict[str, Any]] = [{}, {"params": query}, {"json": {}}, {"json": {"hour": 1}}]
        for arguments in asked:
            api.request(method, filled, **arguments)
    for odd in ("/", "/v1/messages/nothing", "/docs", "/redoc", "/metrics", "/v1/messages/%00"):
        api.get(odd)


def operations(api):
    return {
        (method.upper(), path): operation
        for path, methods in api.ask("GET", "/openapi.json")["paths"].items()
        for method, operation in methods.items()
    }


def test_a_server_that_runs_imports_nothing(make_api, receiver, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    # What happens now and then happens at once.
    api = make_api(file_ms=10, checkpoint_ms=20, retention_ms=0, lead_ms=1, dedupe_window_ms=0)
    api.start()
    api.get("/v1/nothing")  # is answered when all is made
    assert "fastapi" in IMPORTED.findall(api.log)
    api.clear_log()
    tour(api, receiver)
    assert api.process.stop() == 0
    found = IMPORTED.findall(api.log)
    assert not found, found
