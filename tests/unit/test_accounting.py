"""Processes are counted for the test that started them, by kind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.accounting import RUN, Process, ProcessReader, Times

SPIN = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(60)"


def test_a_real_process_is_counted_for_its_test(request: pytest.FixtureRequest) -> None:
    run = f"{request.node.name} {os.getpid()}"
    reader = ProcessReader(run, interval_s=0.02)
    command = [sys.executable, "-c", SPIN, "kafka.Kafka"]
    with subprocess.Popen(command, env={**os.environ, RUN: run}) as process:
        give_up_s = time.monotonic() + 30
        while time.monotonic() < give_up_s:
            if any(one.processor_s >= 0.3 for one in reader.found()):
                break
        process.kill()
    (found,) = reader.close()
    assert found.kind == "Kafka" and found.processor_s >= 0.3
    assert found.test == request.node.nodeid


def test_a_process_that_has_ended_counts_for_what_it_took(tmp_path: Path) -> None:
    one = tmp_path / "7"
    one.mkdir()
    (one / "cmdline").write_text("redis-server\0--port\0001")
    (one / "environ").write_bytes(
        b"PYTEST_RUN=r\0PYTEST_CURRENT_TEST=tests/a/test_b.py::test_c (setup)\0"
    )
    fields = ["S", *"0" * 10, "150", "50", *"0" * 6, "4711"]
    (one / "stat").write_text(f"7 (a (strange) name) {' '.join(fields)}")
    reader = ProcessReader("r", tmp_path, interval_s=0.01)
    give_up_s = time.monotonic() + 30
    while not reader.found() and time.monotonic() < give_up_s:
        pass
    (one / "stat").unlink()
    (found,) = reader.close()
    assert (found.kind, found.test) == ("Redis", "tests/a/test_b.py::test_c")
    assert found.processor_s == pytest.approx(2.0, rel=0.5)  # 100 ticks a second


def test_processes_are_added_to_files_and_kinds() -> None:
    times = Times()
    test = "tests/a/test_b.py::test_c"
    times.add_processes(
        [
            Process("python -m delayserver serve", test, processor_s=1.5),
            Process("/usr/bin/delayserver.api.shard", test, processor_s=0.5),
            Process("sleep 60", test, processor_s=0.25),
        ]
    )
    assert times.kinds == {"server": (2, 2.0), "other": (1, 0.25)}
    assert times.files["tests/a/test_b.py"].processor_s == times.processor_s == 2.25
