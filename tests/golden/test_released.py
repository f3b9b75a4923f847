"""The directory that a released version wrote is opened, carried over, and has all that it had."""

import asyncio
import json
import tarfile
from pathlib import Path

import pytest
import uvloop

from delayserver.clocks import wall_clock_ms
from delayserver.config import Settings
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.recovery.check import check_path
from delayserver.server.server import Server
from storage.directory import FORMAT_VERSION
from tests.crash.backups import states_in

RELEASED = {"0.1.0": 1}
"""Version, and the format of its directories."""
CATALOG_MAX_BYTES = 1 << 30


@pytest.mark.parametrize("version", RELEASED)
def test_nothing_is_lost_on_the_way(version: str, tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / f"released-{version}.tar.gz") as tar:
        # Python 3.11.2, which Debian 12 has, knows it by this attribute, or not at all.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert json.loads((tmp_path / "FORMAT").read_text())["format"] == RELEASED[version]
    assert check_path(tmp_path, catalog_max_bytes=CATALOG_MAX_BYTES).damage == []
    offset_ms = expected["now_ms"] - wall_clock_ms()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Twice: the second start finds a directory of this version.
        for _ in range(2):
            ids = {message_id for message_id, _ in expected["states"].values()}
            found = runner.run(states_in(tmp_path, offset_ms, ids))
            assert {
                name: found[message_id] for name, (message_id, _) in expected["states"].items()
            } == {name: state for name, (_, state) in expected["states"].items()}
            assert json.loads((tmp_path / "FORMAT").read_text())["format"] == FORMAT_VERSION
            assert check_path(tmp_path, catalog_max_bytes=CATALOG_MAX_BYTES).damage == []
        runner.run(_look_at_definitions(tmp_path, offset_ms, expected["states"]))


async def _look_at_definitions(
    directory: Path, offset_ms: int, states: dict[str, tuple[str, str]]
) -> None:
    """What is no message: names, keys, subscriptions, dead letters, heartbeats."""

    def fatal(error: BaseException) -> None:
        raise error

    settings = Settings(data_dir=directory, clock_offset_ms=offset_ms, segment_bytes=1 << 16)
    server = Server(settings, fatal=fatal)
    server.hold_back()
    await server.start()
    try:
        calls = server.calls
        assert {one.name for one in calls.registry} >= {"worker", "refuses"}
        for key, name in (("k1", "with key"), ("k2", "unfiled")):
            assert calls.message_id(states[name][0]).seq == calls.by_key("order.unpaid", key).seq
        assert calls.part(Heartbeats).get("probe") is not None
        (refuses,) = await calls.redrives.owners("refuses")
        assert len(calls.redrives._some_letters(refuses, 0, 1 << 40, None)) == 1
    finally:
        await server.stop()
