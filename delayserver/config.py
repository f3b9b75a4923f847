"""All settings, their defaults, and how they relate.

Sources, the first that speaks wins: command-line flags, `DELAYSERVER_…` variables, a TOML file
(`--config`, or DELAYSERVER_CONFIG), the defaults below. Relations between limits are checked when
the settings are built, not when the first message trips over them. A list is written as people
write one (`a, b`), or as JSON.
"""

import ipaddress
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from delayserver.errors import InputError
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from delayserver.security.targets import TargetPolicy
from delayserver.times import parse_duration_ms
from storage.catalog import MAX_BYTES as CATALOG_MAX_BYTES
from storage.message_log import Durability
from storage.shards import SHARDS_MAX

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
_JSON_LIST = re.compile(r'\s*\[\s*["\]]')
DAY_MS = 24 * 60 * MINUTE_MS
ORIGIN_PATTERN = r"^https?://[^/?#@*\s]+$"
"""That of a web page: never all of them."""


class Settings(BaseSettings):
    """Settings of one server. Durations: integer milliseconds, or text such as `10m`."""

    model_config = SettingsConfigDict(
        env_prefix="DELAYSERVER_", extra="forbid", frozen=True, validate_default=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on (0: any free one)")
    data_dir: Path = Field(Path("data"), description="directory of all data of this server")
    shards: int = Field(
        1,
        ge=1,
        le=SHARDS_MAX,
        description="processes that share the messages, one for each core; fixed when the directory"
        " is made",
    )
    cluster: str | None = Field(
        None,
        description="be a node of a cluster, whose logs stand in Kafka: kafka://HOST:PORT,…/NAME; "
        "the cluster says how many shards there are",
    )
    node: str | None = Field(None, description="name of this node in the cluster, for good")
    zone: str | None = Field(
        None,
        description="what this node may be lost with, such as a rack: the replicas of a shard are "
        "in different zones (default: a zone of its own)",
    )
    advertise: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+$",
        description="where clients and other nodes reach this node: http://HOST:PORT",
    )
    link_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="first of the ports, one for each shard, at which other nodes reach this one "
        "(0: any free ones)",
    )
    kafka_config: Path | None = Field(
        None, description="settings of the Kafka clients (TLS, SASL), a name=value in each line"
    )
    durability: Durability = Field(
        Durability.FSYNC, description="fsync: survives power loss; os: survives kill -9 only"
    )
    token: str | None = Field(
        None,
        min_length=16,
        description="bearer token with all rights, besides those that were made",
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): serve HTTPS")
    tls_key: Path | None = Field(None, description="private key of the certificate (PEM)")
    tls_client_ca: Path | None = Field(
        None, description="ask clients for a certificate that one of these authorities made (PEM)"
    )
    webhook_targets: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="hosts and networks that webhooks, and messages to brokers, may go to, with "
        "commas between them (default: loopback only)",
    )
    cors_origins: Annotated[tuple[Annotated[str, Field(pattern=ORIGIN_PATTERN)], ...], NoDecode] = (
        Field(
            (), description="origins whose web pages may call (CORS), such as https://shop.example"
        )
    )
    log_json: bool = Field(False, description="log lines as JSON")
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="least level"
    )

    otel: bool = Field(
        False, description="spans for OpenTelemetry (extra `otel`; OTEL_… variables say where to)"
    )

    delay_max_ms: int = Field(2 * 365 * DAY_MS, gt=0, description="longest delay accepted")
    body_max_bytes: int = Field(MIB, gt=0, description="longest message accepted")
    batch_max_messages: int = Field(10_000, gt=0, description="most messages in one batch")
    batch_max_bytes: int = Field(64 * MIB, gt=0, le=GIB // 4, description="longest batch accepted")
    answer_max_bytes: int = Field(
        16 * MIB, gt=0, le=GIB, description="most bytes of messages in one answer; at least one"
    )
    broker_bodies_max_bytes: int = Field(
        64 * MIB,
        gt=0,
        le=64 * GIB,
        description="most bytes of messages on their way to brokers; one of each subscription "
        "besides",
    )
    import_max_messages: int = Field(
        20_000_000, gt=0, description="most messages in one import; 40 bytes of memory per key"
    )
    imports_waiting_max: int = Field(
        16, gt=0, description="most imports that wait for the one that is being adopted"
    )
    subjects_max: int = Field(100_000, gt=0, le=30_000_000, description="most subjects")
    subscriptions_max: int = Field(10_000, gt=0, description="most subscriptions")
    heartbeats_max: int = Field(1_000_000, gt=0, description="most heartbeats")
    schedules_max: int = Field(100_000, gt=0, description="most schedules")
    sources_max: int = Field(
        100, gt=0, le=1000, description="most sources, each of which has a client of its own"
    )
    dedupe_window_ms: int = Field(
        5 * MINUTE_MS, ge=0, description="a key stays taken this long after the due time"
    )
    retention_ms: int = Field(
        DAY_MS,
        ge=0,
        description="a settled hour's files are kept this long after its end, "
        "and at least for the dedupe window",
    )
    archive: bool = Field(
        False, description="… and until it was archived (`pipeline archive`), however long that is"
    )
    backup_dir: Path | None = Field(
        None,
        description="directory of this machine that backups are made in, best on another disk; "
        "without it there are none",
    )
    backup_bytes_per_s: int = Field(
        64 * MIB, ge=MIB, description="a backup reads no more than this in a second"
    )
    backup_log_ms: int = Field(
        10 * SECOND_MS,
        ge=0,
        description="the message log is copied behind the backups this often, so that `restore "
        "--until` reaches any moment; 0: never",
    )
    backup_log_held_max_bytes: int = Field(
        GIB,
        ge=MIB,
        description="of the message log so much is kept, if the directory of backups does not take "
        "it; then the copy breaks off until the next backup",
    )
    lead_ms: int = Field(10 * MINUTE_MS, gt=0, description="an hour is loaded this long before")
    drain_ms: int = Field(10 * SECOND_MS, ge=0, description="grace for deliveries at a stop")

    segment_bytes: int = Field(64 * MIB, ge=4096, description="length of a message log segment")
    file_ms: int = Field(
        1000,
        gt=0,
        description="what was accepted is filed this often; where that takes long, up to 1.5 times "
        "as seldom",
    )
    checkpoint_ms: int = Field(
        5 * SECOND_MS, gt=0, description="time between two checkpoints, which file, too"
    )
    checkpoint_bytes: int = Field(64 * MIB, gt=0, description="… or this much accepted")
    settle_sync_ms: int = Field(
        100, ge=0, description="dispatch log synced at least this often (0: each time)"
    )
    unfiled_max_bytes: int = Field(
        256 * MIB,
        gt=0,
        le=64 * GIB,
        description="accepted but unfiled bytes beyond which publishing waits",
    )
    group_max_bytes: int = Field(
        32 * MIB, gt=0, le=GIB, description="most bytes in one commit group"
    )
    catalog_max_bytes: int = Field(
        CATALOG_MAX_BYTES, gt=0, description="limit of the catalog's file"
    )
    disk_reserve_bytes: int = Field(
        512 * MIB, ge=0, description="publishing is refused when less than this is free"
    )
    connections_max: int = Field(10_000, gt=0, description="most connections of clients at once")
    headers_max: int = Field(100, gt=0, description="most headers of a request")
    head_max_bytes: int = Field(
        64 * KIB, ge=KIB, description="longest address and headers of a request"
    )
    head_timeout_ms: int = Field(
        10 * SECOND_MS, gt=0, description="the head of a request is there this long after it began"
    )
    body_timeout_ms: int = Field(
        20 * SECOND_MS, gt=0, description="its body this long after that, and 1 s more for each KiB"
    )
    body_time_max_ms: int = Field(
        5 * MINUTE_MS, gt=0, description="… but no longer than this after that"
    )
    receiving_max_bytes: int = Field(
        256 * MIB,
        gt=0,
        description="most bytes of all bodies that have come in part; of those that wait for their "
        "answers, and of heads, likewise",
    )
    unread_max_bytes: int = Field(
        128 * MIB,
        gt=0,
        description="most bytes of all answers that clients have not read; beyond, the client with"
        " most of them is cut off",
    )
    write_timeout_ms: int = Field(
        30 * SECOND_MS, gt=0, description="a client that reads nothing of its answer is cut off"
    )
    idle_timeout_ms: int = Field(
        75 * SECOND_MS, gt=0, description="a connection without a request is closed"
    )
    metrics_subjects_max: int = Field(
        100,
        ge=0,
        description="subjects, and as many subscriptions, with metrics of their own; the others are"
        " counted together",
    )
    in_flight_max: int = Field(64, gt=0, description="default of a webhook's max_in_flight")
    answer_kept_max_bytes: int = Field(
        1024,
        ge=0,
        le=1024,
        description="of what a webhook answers so much is kept with the attempt; 0: nothing",
    )
    webhook_connections_max: int = Field(
        1024, gt=0, description="most webhooks on their way at once, each on a connection"
    )
    clock_offset_ms: int = Field(0, description="added to the clock, to try an hour change")
    fire_rows_max: int = Field(10_000, gt=0, description="rows that fire in one step of the loop")

    @field_validator(
        "delay_max_ms",
        "dedupe_window_ms",
        "retention_ms",
        "lead_ms",
        "drain_ms",
        "file_ms",
        "checkpoint_ms",
        "settle_sync_ms",
        "head_timeout_ms",
        "body_timeout_ms",
        "body_time_max_ms",
        "write_timeout_ms",
        "idle_timeout_ms",
        mode="before",
    )
    @classmethod
    def _duration(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.isdigit():
            try:
                return parse_duration_ms(value)
            except InputError as error:
                raise ValueError(error.detail) from error
        return value

    @field_validator("webhook_targets", "cors_origins", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _items(value)
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return [item for text in value for item in _items(text)]
        return value

    @field_validator("webhook_targets")
    @classmethod
    def _allowed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            TargetPolicy(value)
        except InputError as error:
            raise ValueError(error.detail) from error
        return value

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.body_max_bytes > PAYLOAD_MAX_BYTES // 2:
            raise ValueError(f"body_max_bytes is at most {PAYLOAD_MAX_BYTES // 2}")
        if self.body_max_bytes > self.batch_max_bytes:
            raise ValueError("batch_max_bytes must be at least body_max_bytes")
        if self.batch_max_bytes > self.receiving_max_bytes:
            raise ValueError("receiving_max_bytes must be at least batch_max_bytes")
        if self.body_timeout_ms > self.body_time_max_ms:
            raise ValueError("body_time_max_ms must be at least body_timeout_ms")
        if self.group_max_bytes > self.unfiled_max_bytes:
            raise ValueError("unfiled_max_bytes must be at least group_max_bytes")
        if self.checkpoint_bytes > self.unfiled_max_bytes:
            raise ValueError("unfiled_max_bytes must be at least checkpoint_bytes")
        if self.cluster is not None:
            if self.node is None or self.advertise is None:
                raise ValueError("cluster goes together with node and advertise")
            if self.shards != 1 or self.durability is not Durability.FSYNC:
                raise ValueError("shards and durability are settings of the cluster, not of a node")
            if self.archive:
                raise ValueError("archive needs a server on its own: nodes delete each for itself")
            if self.advertise.startswith("https:") != (self.tls_cert is not None):
                raise ValueError("advertise begins with https: if there is a tls_cert, else http:")
        elif {self.node, self.zone, self.advertise} != {None}:
            raise ValueError("node, zone and advertise go together with cluster")
        if self.backup_dir is not None:
            backup_dir, data_dir = self.backup_dir.resolve(), self.data_dir.resolve()
            if backup_dir == data_dir or data_dir in backup_dir.parents:
                raise ValueError("backup_dir must not be in data_dir, with which it would be lost")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self

    @property
    def ships_log(self) -> bool:
        """Whether the message log is copied behind backups."""
        return self.backup_dir is not None and self.backup_log_ms > 0 and self.cluster is None

    @property
    def express_ms(self) -> int:
        """What is due sooner than this goes to the wheel before it is filed; filing takes up to
        1.5 `file_ms` and the time of one checkpoint."""
        return 5 * min(self.file_ms, self.checkpoint_ms)

    @property
    def kept_ms(self) -> int:
        """A settled hour is kept so long after its end: its keys go with it, so not before the
        dedupe window of what fell due last has passed."""
        return max(self.retention_ms, self.dedupe_window_ms)

    def of_shard(self, data_dir: Path) -> "Settings":
        """The settings of one shard, which has its data in `data_dir`: what is a limit of the whole
        server is divided."""
        count = self.shards
        least = {
            "receiving_max_bytes": self.batch_max_bytes,
            "unfiled_max_bytes": max(self.group_max_bytes, self.checkpoint_bytes),
        }
        divided = {
            name: max(-(-getattr(self, name) // count), least.get(name, 1)) for name in _OF_ALL
        }
        return self.model_copy(update={**divided, "data_dir": data_dir, "shards": 1})

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        config = init_settings.init_kwargs.pop("config", None)
        file = InitSettingsSource(settings_cls, init_kwargs=_read_toml(config))
        return init_settings, env_settings, file


def _items(text: str) -> list[str]:
    """`a, b` or `["a", "b"]` as its items."""
    if _JSON_LIST.match(text):  # [::1]:80 is none
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
        raise ValueError('a list is written a, b or ["a", "b"]')
    return [item.strip() for item in text.split(",") if item.strip()]


def _read_toml(path: object) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(str(path)).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read the configuration file {path}: {error}") from error


_OF_ALL: Final = (
    "broker_bodies_max_bytes",
    "connections_max",
    "heartbeats_max",
    "receiving_max_bytes",
    "schedules_max",
    "sources_max",
    "unfiled_max_bytes",
    "unread_max_bytes",
    "webhook_connections_max",
)
"""Limits that the shards of a server keep together."""
GROUPS: Final = {
    "Where": ("host", "port", "data_dir", "shards"),
    "Cluster": ("cluster", "node", "zone", "advertise", "link_port", "kafka_config"),
    "Access": (
        "token",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "webhook_targets",
        "cors_origins",
    ),
    "What is kept, and for how long": (
        "durability",
        "dedupe_window_ms",
        "retention_ms",
        "archive",
        "backup_dir",
        "backup_bytes_per_s",
        "backup_log_ms",
        "backup_log_held_max_bytes",
        "disk_reserve_bytes",
    ),
    "Logs, metrics, traces": ("log_json", "log_level", "otel", "metrics_subjects_max"),
    "What is accepted": (
        "delay_max_ms",
        "body_max_bytes",
        "batch_max_messages",
        "batch_max_bytes",
        "import_max_messages",
        "imports_waiting_max",
        "subjects_max",
        "subscriptions_max",
        "heartbeats_max",
        "schedules_max",
        "sources_max",
        "unfiled_max_bytes",
    ),
    "Connections": (
        "connections_max",
        "headers_max",
        "head_max_bytes",
        "head_timeout_ms",
        "body_timeout_ms",
        "body_time_max_ms",
        "receiving_max_bytes",
        "unread_max_bytes",
        "write_timeout_ms",
        "idle_timeout_ms",
    ),
    "Delivery": (
        "in_flight_max",
        "webhook_connections_max",
        "answer_kept_max_bytes",
        "answer_max_bytes",
        "broker_bodies_max_bytes",
        "lead_ms",
        "drain_ms",
        "fire_rows_max",
        "clock_offset_ms",
    ),
    "Logs on the disk": (
        "segment_bytes",
        "group_max_bytes",
        "file_ms",
        "checkpoint_ms",
        "checkpoint_bytes",
        "settle_sync_ms",
        "catalog_max_bytes",
    ),
}
"""Headings, and the settings below them, as the help and the documents show them. A new setting is
put into one of these."""
