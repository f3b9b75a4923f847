"""An owner whose disk does not keep up gives its shard to a node whose disk does."""

from __future__ import annotations

import time
from pathlib import Path

from delayserver.decisions.groups import SLOW_MS
from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, running, until

UNFILED_MAX_BYTES = 1 << 20
A_MINUTE = "60000"


def test_an_owner_that_files_too_slowly(brokers: Brokers, url: ClusterUrl, tmp_path: Path) -> None:
    # As with a disk that is busy, nothing is filed for a minute.
    slow = NodeProcess("n1", url, tmp_path)
    slow.options += ["--file-ms", A_MINUTE, "--checkpoint-ms", A_MINUTE]
    slow.options += ["--unfiled-max-bytes", str(UNFILED_MAX_BYTES)]
    slow.options += ["--checkpoint-bytes", str(UNFILED_MAX_BYTES)]
    slow.options += ["--group-max-bytes", str(UNFILED_MAX_BYTES)]
    quick = NodeProcess("n2", url, tmp_path)
    with running(slow):
        began_s = time.monotonic()
        slow.publish("first")
        with running(quick):
            assert quick.owners() == ["n1"]
            until(lambda: quick.call_once("GET", "/readyz"), "it is in step")
            body = "x" * (UNFILED_MAX_BYTES // 10)
            message = {"subject": "order.late", "body": body, "delay": "1h"}
            ids = [slow.call("POST", "/v1/messages", message)["id"] for _ in range(7)]
            until(lambda: quick.owners() == ["n2"], "another owner")
            took_s = time.monotonic() - began_s
            print(f"another owner after {took_s:.1f} s")
            assert took_s >= SLOW_MS / 1000, "not for a disk that is busy for a moment"
            for node in (slow, quick):
                states = {node.call("GET", f"/v1/messages/{one}")["state"] for one in ids}
                assert states == {"scheduled"}
            text = slow.log_path.read_text()
            assert "gives its shard away" in text and "disk_is_slow=True" in text
            assert "status=" not in text, "all in order"
