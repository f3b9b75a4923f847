"""The audit beside a real server that publishes, delivers, and is killed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delayserver.pipeline.audits.audit import audit_here
from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.progress import Job
from tests.integration.api_support import ApiServer, Receiver
from tests.waiting import wait_until

BATCH = 500
PAUSE_S = 0.1
"""Between batches: the slower the machine, the more there would be to audit."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path, segment_bytes=1 << 18, checkpoint_ms=200)
    server.start()
    yield server
    server.shut_down()


def test_the_audit_is_clean_whatever_the_server_is_doing(
    spark: SparkSession, api: ApiServer
) -> None:
    receiver = Receiver()
    url = receiver.hook(200)
    api.subscribe("hook", "live.*", url=url)
    ended = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        while not ended.wait(PAUSE_S):
            messages = [
                {"subject": "live.a", "body": n, "delay": f"{n % 3000}ms"} for n in range(BATCH)
            ]
            api.ask("POST", "/v1/messages/batch", json=messages)
            published += BATCH

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        wait_until(lambda: published > 2 * BATCH)
        for _ in range(2):
            before = published
            found = audit(Job(spark), str(api.data_dir))
            assert found.is_clean, (found.violations, found.damage)
            assert before <= found.messages["accepted"] <= published + BATCH
    finally:
        ended.set()
        thread.join()
    api.process.kill()
    found = audit_here(str(api.data_dir))
    assert found.is_clean, (found.violations, found.damage)
    assert found.messages["accepted"] == published
    receiver.close()
