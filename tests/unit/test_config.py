"""Settings: their sources in order, and relations that are checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from delayserver.config import GIB, MIB, Settings, by_heading
from delayserver.errors import InputError
from delayserver.recovery.recover import BATCH_BYTES
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from delayserver.times import format_duration
from storage.frame import PAYLOAD_MAX_BYTES as FRAME_PAYLOAD_MAX_BYTES
from storage.message_log import Durability


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DELAYSERVER_"):
            monkeypatch.delenv(name)


def test_the_defaults_are_valid_and_on_loopback() -> None:
    settings = Settings()
    assert settings.on_loopback
    assert settings.durability is Durability.FSYNC
    assert settings.express_ms > settings.file_ms
    assert (
        Settings(checkpoint_ms=50).express_ms == 250
    )  # what is filed then is no longer waited for


def test_flags_win_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nlead_ms = "20m"\nretention_ms = 5\n')
    monkeypatch.setenv("DELAYSERVER_PORT", "2")
    monkeypatch.setenv("DELAYSERVER_LEAD_MS", "30m")
    settings = Settings(config=str(file), port=3)  # type: ignore[call-arg]
    assert (settings.port, settings.lead_ms, settings.retention_ms) == (3, 30 * 60_000, 5)


@pytest.mark.parametrize(
    ("value", "milliseconds"), [("90s", 90_000), ("1h30m", 5_400_000), ("250", 250), (7, 7)]
)
def test_a_duration_is_milliseconds_or_text(value: object, milliseconds: int) -> None:
    assert Settings(lead_ms=value).lead_ms == milliseconds


def test_every_setting_of_milliseconds_takes_text() -> None:
    names = [name for name in Settings.model_fields if name.endswith("_ms")]
    assert {"backup_log_ms", "clock_offset_ms", "lead_ms"} < set(names)
    for name in names:
        wanted = Settings.model_fields[name].default
        for text in (format_duration(wanted), str(wanted)):
            assert getattr(Settings(**{name: text}), name) == wanted  # type: ignore[arg-type]
    assert Settings(clock_offset_ms="-5").clock_offset_ms == -5


def test_every_setting_is_in_one_group() -> None:
    names = [name for names in by_heading().values() for name in names]
    assert sorted(names) == sorted(Settings.model_fields)
    assert all(by_heading().values())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lead_ms": "soon"}, "lead_ms"),
        ({"lead_ms": 0}, "lead_ms"),
        ({"port": 70_000}, "port"),
        ({"log_level": "loud"}, "log_level"),
        ({"durability": "maybe"}, "durability"),
        ({"token": "short"}, "token"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"body_max_bytes": PAYLOAD_MAX_BYTES}, "body_max_bytes"),
        ({"body_max_bytes": 2 * MIB, "batch_max_bytes": MIB}, "batch_max_bytes"),
        ({"receiving_max_bytes": 32 * MIB}, "receiving_max_bytes"),
        ({"body_timeout_ms": 600_000}, "body_time_max_ms"),
        ({"cors_origins": ["*"]}, "cors_origins"),
        ({"cors_origins": ["https://a/"]}, "cors_origins"),
        ({"group_max_bytes": 300 * MIB}, "unfiled_max_bytes"),
        ({"checkpoint_bytes": 300 * MIB}, "unfiled_max_bytes"),
        ({"unfiled_max_bytes": 65 * GIB}, "unfiled_max_bytes"),
        ({"group_max_bytes": GIB + 1, "unfiled_max_bytes": 2 * GIB}, "group_max_bytes"),
        ({"batch_max_bytes": GIB // 2}, "batch_max_bytes"),
        ({"answer_max_bytes": GIB + 1}, "answer_max_bytes"),
        ({"head_max_bytes": 1}, "head_max_bytes"),
        ({"tls_cert": "cert.pem"}, "tls_key"),
        ({"tls_key": "key.pem"}, "tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_cert"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Settings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["node", "zone", "advertise"])
def test_what_a_node_is_means_nothing_without_a_cluster(name: str) -> None:
    value = "http://n1:8080" if name == "advertise" else "n1"
    with pytest.raises(ValidationError, match="node, zone and advertise go together with cluster"):
        Settings(**{name: value})  # type: ignore[arg-type]
    where = {"cluster": "kafka://b1:9092/c", "node": "n1", "advertise": "http://n1:8080"}
    assert Settings(**where).zone is None  # type: ignore[arg-type]
    assert Settings(**where, zone="a").zone == "a"  # type: ignore[arg-type]


def test_the_longest_groups_and_batches_fit_into_a_frame() -> None:
    def longest(name: str) -> int:
        [limit] = [rule.le for rule in Settings.model_fields[name].metadata if hasattr(rule, "le")]
        return int(limit)

    # JSON of what came as MessagePack is up to six times as long (a control character).
    frame_bytes = max(longest("group_max_bytes"), 6 * longest("batch_max_bytes"))
    # A start files some bytes together, and the frame that made them too many.
    assert frame_bytes + BATCH_BYTES < FRAME_PAYLOAD_MAX_BYTES


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "shop.example"])
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not Settings(host=host).on_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_what_only_this_machine_can_reach_is_loopback(host: str) -> None:
    assert Settings(host=host).on_loopback


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", [None, "port = "])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "server.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=r"server\.toml"):
        Settings(config=str(file))  # type: ignore[call-arg]


def test_an_unknown_name_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        Settings(config=str(file))  # type: ignore[call-arg]


def test_a_shard_has_its_part_of_what_is_limited_for_all() -> None:
    settings = Settings(shards=4, connections_max=10, heartbeats_max=1, host="localhost")
    made = settings.of_shard(Path("there"))
    assert (made.data_dir, made.shards, made.host) == (Path("there"), 1, "localhost")
    assert (made.connections_max, made.heartbeats_max) == (3, 1)
    assert made.receiving_max_bytes == settings.receiving_max_bytes // 4
    assert made.webhook_connections_max == settings.webhook_connections_max // 4
    # A shard has to take the longest batch, and a whole group.
    few = Settings(shards=256).of_shard(Path("there"))
    assert few.receiving_max_bytes == few.batch_max_bytes
    assert few.unfiled_max_bytes == few.checkpoint_bytes
    assert Settings().of_shard(Path("data")) == Settings()


def test_backups_do_not_stand_in_what_they_are_of(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path / "data", backup_dir=tmp_path / "data-backups").backup_dir
    for inside in (tmp_path / "data", tmp_path / "data/backups", tmp_path / "x/../data/backups"):
        with pytest.raises(ValidationError, match="must not be in data_dir"):
            Settings(data_dir=tmp_path / "data", backup_dir=inside)
