"""All settings, their defaults, their headings, and how they relate.

Sources, the first that speaks wins: command-line flags, `DELAYSERVER_…` variables, a TOML file
(`--config`, or DELAYSERVER_CONFIG), the defaults below. Relations between limits are checked when
the settings are built, not when the first message trips over them. A list is written as people
write one (`a, b`), or as JSON.
"""

import ipaddress
import json
import re
import tomllib
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
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
_NUMBER = re.compile(r"\s*[+-]?\d+\s*")
_JSON_LIST = re.compile(r'\s*\[\s*["\]]')
DAY_MS = 24 * 60 * MINUTE_MS
ORIGIN_PATTERN = r"^https?://[^/?#@*\s]+$"
"""The origin of a web page: never `*`."""


class Heading(Enum):
    """A group of settings. The help of `serve`, docs/configuration.md and the values of the chart
    show the headings in this order, and under each its settings in the order in which they are
    declared. A new server may need the first ten; few servers change the advanced ones."""

    ADDRESS = "Address"
    DIRECTORY = "Directory"
    TOKEN = "Token"
    TLS = "TLS"
    TARGETS = "Targets"
    DURABILITY = "Durability"
    RETENTION = "Retention"
    SHARDS = "Shards"
    CLUSTER = "Cluster"
    LOG = "Log"

    TELEMETRY = "Advanced: metrics and traces"
    BACKUPS = "Advanced: backups"
    PUBLISHING = "Advanced: messages that are accepted"
    CONNECTIONS = "Advanced: connections"
    DELIVERY = "Advanced: delivery"
    DISK = "Advanced: files on the disk"


class Settings(BaseSettings):
    """Settings of one server, each with its heading. Durations: integer milliseconds, or text such
    as `10m`."""

    model_config = SettingsConfigDict(
        env_prefix="DELAYSERVER_", extra="forbid", frozen=True, validate_default=True
    )

    host: Annotated[str, Heading.ADDRESS] = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Heading.ADDRESS] = Field(
        8080, ge=0, le=65535, description="port to listen on (0: any free one)"
    )

    data_dir: Annotated[Path, Heading.DIRECTORY] = Field(
        Path("data"), description="directory of all data of this server"
    )

    token: Annotated[str | None, Heading.TOKEN] = Field(
        None,
        min_length=16,
        description="bearer token with all rights, besides those that were made",
    )

    tls_cert: Annotated[Path | None, Heading.TLS] = Field(
        None, description="certificate chain (PEM): serve HTTPS"
    )
    tls_key: Annotated[Path | None, Heading.TLS] = Field(
        None, description="private key of the certificate (PEM)"
    )
    tls_client_ca: Annotated[Path | None, Heading.TLS] = Field(
        None, description="ask clients for a certificate that one of these authorities made (PEM)"
    )

    webhook_targets: Annotated[tuple[str, ...], NoDecode, Heading.TARGETS] = Field(
        (),
        description="hosts and networks that webhooks, and messages to brokers, may go to, with "
        "commas between them (default: loopback only)",
    )

    durability: Annotated[Durability, Heading.DURABILITY] = Field(
        Durability.FSYNC, description="fsync: survives power loss; os: survives kill -9 only"
    )

    retention_ms: Annotated[int, Heading.RETENTION] = Field(
        DAY_MS,
        ge=0,
        description="a settled hour's files are kept this long after its end, "
        "and at least for the dedupe window",
    )
    archive: Annotated[bool, Heading.RETENTION] = Field(
        False, description="… and until it was archived (`pipeline archive`), however long that is"
    )
    dedupe_window_ms: Annotated[int, Heading.RETENTION] = Field(
        5 * MINUTE_MS, ge=0, description="a key stays taken this long after the due time"
    )

    shards: Annotated[int, Heading.SHARDS] = Field(
        1,
        ge=1,
        le=SHARDS_MAX,
        description="processes that share the messages, one for each core; fixed when the directory"
        " is made",
    )

    cluster: Annotated[str | None, Heading.CLUSTER] = Field(
        None,
        description="be a node of a cluster, whose logs stand in Kafka: kafka://HOST:PORT,…/NAME; "
        "the cluster says how many shards there are",
    )
    node: Annotated[str | None, Heading.CLUSTER] = Field(
        None, description="name of this node in the cluster, for good"
    )
    zone: Annotated[str | None, Heading.CLUSTER] = Field(
        None,
        description="the rack or data centre of this node: the replicas of a shard are in "
        "different zones (default: a zone of its own)",
    )
    advertise: Annotated[str | None, Heading.CLUSTER] = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+$",
        description="where clients and other nodes reach this node: http://HOST:PORT",
    )
    link_port: Annotated[int, Heading.CLUSTER] = Field(
        0,
        ge=0,
        le=65535,
        description="first of the ports, one for each shard, at which other nodes reach this one "
        "(0: any free ones)",
    )
    kafka_config: Annotated[Path | None, Heading.CLUSTER] = Field(
        None, description="settings of the Kafka clients (TLS, SASL), a name=value in each line"
    )

    log_level: Annotated[str, Heading.LOG] = Field(
        "info", pattern="^(debug|info|warning|error)$", description="least level"
    )
    log_json: Annotated[bool, Heading.LOG] = Field(False, description="log lines as JSON")

    otel: Annotated[bool, Heading.TELEMETRY] = Field(
        False, description="spans for OpenTelemetry (extra `otel`; OTEL_… variables say where to)"
    )
    metrics_subjects_max: Annotated[int, Heading.TELEMETRY] = Field(
        100,
        ge=0,
        description="subjects, and as many subscriptions, with metrics of their own; the others are"
        " counted together",
    )

    backup_dir: Annotated[Path | None, Heading.BACKUPS] = Field(
        None,
        description="directory of this machine that backups are made in, best on another disk; "
        "without it there are none",
    )
    backup_bytes_per_s: Annotated[int, Heading.BACKUPS] = Field(
        64 * MIB, ge=MIB, description="a backup reads no more than this in a second"
    )
    backup_log_ms: Annotated[int, Heading.BACKUPS] = Field(
        10 * SECOND_MS,
        ge=0,
        description="the message log is copied behind the backups this often, so that `restore "
        "--until` reaches any moment; 0: never",
    )
    backup_log_held_max_bytes: Annotated[int, Heading.BACKUPS] = Field(
        GIB,
        ge=MIB,
        description="of the message log so much is kept, if the directory of backups does not take "
        "it; then the copy breaks off until the next backup",
    )

    delay_max_ms: Annotated[int, Heading.PUBLISHING] = Field(
        2 * 365 * DAY_MS, gt=0, description="longest delay accepted"
    )
    body_max_bytes: Annotated[int, Heading.PUBLISHING] = Field(
        MIB, gt=0, description="longest message accepted"
    )
    batch_max_messages: Annotated[int, Heading.PUBLISHING] = Field(
        10_000, gt=0, description="most messages in one batch"
    )
    batch_max_bytes: Annotated[int, Heading.PUBLISHING] = Field(
        64 * MIB, gt=0, le=GIB // 4, description="longest batch accepted"
    )
    import_max_messages: Annotated[int, Heading.PUBLISHING] = Field(
        20_000_000, gt=0, description="most messages in one import; 40 bytes of memory per key"
    )
    imports_waiting_max: Annotated[int, Heading.PUBLISHING] = Field(
        16, gt=0, description="most imports that wait for the one that is being adopted"
    )
    subjects_max: Annotated[int, Heading.PUBLISHING] = Field(
        100_000, gt=0, le=30_000_000, description="most subjects"
    )
    subscriptions_max: Annotated[int, Heading.PUBLISHING] = Field(
        10_000, gt=0, description="most subscriptions"
    )
    heartbeats_max: Annotated[int, Heading.PUBLISHING] = Field(
        1_000_000, gt=0, description="most heartbeats"
    )
    schedules_max: Annotated[int, Heading.PUBLISHING] = Field(
        100_000, gt=0, description="most schedules"
    )
    sources_max: Annotated[int, Heading.PUBLISHING] = Field(
        100, gt=0, le=1000, description="most sources, each of which has a client of its own"
    )
    unfiled_max_bytes: Annotated[int, Heading.PUBLISHING] = Field(
        256 * MIB,
        gt=0,
        le=64 * GIB,
        description="accepted but unfiled bytes beyond which publishing waits",
    )

    cors_origins: Annotated[
        tuple[Annotated[str, Field(pattern=ORIGIN_PATTERN)], ...], NoDecode, Heading.CONNECTIONS
    ] = Field(
        (), description="origins whose web pages may call (CORS), such as https://shop.example"
    )
    connections_max: Annotated[int, Heading.CONNECTIONS] = Field(
        10_000, gt=0, description="most connections of clients at once"
    )
    headers_max: Annotated[int, Heading.CONNECTIONS] = Field(
        100, gt=0, description="most headers of a request"
    )
    head_max_bytes: Annotated[int, Heading.CONNECTIONS] = Field(
        64 * KIB, ge=KIB, description="longest address and headers of a request"
    )
    head_timeout_ms: Annotated[int, Heading.CONNECTIONS] = Field(
        10 * SECOND_MS, gt=0, description="the head of a request is there this long after it began"
    )
    body_timeout_ms: Annotated[int, Heading.CONNECTIONS] = Field(
        20 * SECOND_MS, gt=0, description="its body this long after that, and 1 s more for each KiB"
    )
    body_time_max_ms: Annotated[int, Heading.CONNECTIONS] = Field(
        5 * MINUTE_MS, gt=0, description="… but no longer than this after that"
    )
    receiving_max_bytes: Annotated[int, Heading.CONNECTIONS] = Field(
        256 * MIB,
        gt=0,
        description="most bytes of all bodies that have come in part; of those that wait for their "
        "answers, and of heads, likewise",
    )
    unread_max_bytes: Annotated[int, Heading.CONNECTIONS] = Field(
        128 * MIB,
        gt=0,
        description="most bytes of all answers that clients have not read; beyond, the client with"
        " most of them is cut off",
    )
    write_timeout_ms: Annotated[int, Heading.CONNECTIONS] = Field(
        30 * SECOND_MS, gt=0, description="a client that reads nothing of its answer is cut off"
    )
    idle_timeout_ms: Annotated[int, Heading.CONNECTIONS] = Field(
        75 * SECOND_MS, gt=0, description="a connection without a request is closed"
    )

    in_flight_max: Annotated[int, Heading.DELIVERY] = Field(
        64, gt=0, description="default of a webhook's max_in_flight"
    )
    webhook_connections_max: Annotated[int, Heading.DELIVERY] = Field(
        1024, gt=0, description="most webhooks on their way at once, each on a connection"
    )
    answer_kept_max_bytes: Annotated[int, Heading.DELIVERY] = Field(
        1024,
        ge=0,
        le=1024,
        description="bytes of a webhook's answer that are kept with the attempt; 0: nothing",
    )
    answer_max_bytes: Annotated[int, Heading.DELIVERY] = Field(
        16 * MIB, gt=0, le=GIB, description="most bytes of messages in one answer; at least one"
    )
    broker_bodies_max_bytes: Annotated[int, Heading.DELIVERY] = Field(
        64 * MIB,
        gt=0,
        le=64 * GIB,
        description="most bytes of messages on their way to brokers; one of each subscription "
        "besides",
    )
    lead_ms: Annotated[int, Heading.DELIVERY] = Field(
        10 * MINUTE_MS, gt=0, description="an hour is loaded this long before"
    )
    drain_ms: Annotated[int, Heading.DELIVERY] = Field(
        10 * SECOND_MS, ge=0, description="grace for deliveries at a stop"
    )
    fire_rows_max: Annotated[int, Heading.DELIVERY] = Field(
        10_000, gt=0, description="rows that fire in one step of the loop"
    )
    clock_offset_ms: Annotated[int, Heading.DELIVERY] = Field(
        0, description="added to the clock, to try an hour change"
    )

    segment_bytes: Annotated[int, Heading.DISK] = Field(
        64 * MIB, ge=4096, description="length of a message log segment"
    )
    group_max_bytes: Annotated[int, Heading.DISK] = Field(
        32 * MIB, gt=0, le=GIB, description="most bytes in one commit group"
    )
    file_ms: Annotated[int, Heading.DISK] = Field(
        1000,
        gt=0,
        description="accepted messages are filed this often; if filing takes long, up to 1.5 times "
        "as seldom",
    )
    checkpoint_ms: Annotated[int, Heading.DISK] = Field(
        5 * SECOND_MS, gt=0, description="time between two checkpoints, which file, too"
    )
    checkpoint_bytes: Annotated[int, Heading.DISK] = Field(
        64 * MIB, gt=0, description="… or this much accepted"
    )
    settle_sync_ms: Annotated[int, Heading.DISK] = Field(
        100, ge=0, description="dispatch log synced at least this often (0: each time)"
    )
    catalog_max_bytes: Annotated[int, Heading.DISK] = Field(
        CATALOG_MAX_BYTES, gt=0, description="limit of the catalog's file"
    )
    disk_reserve_bytes: Annotated[int, Heading.DISK] = Field(
        512 * MIB, ge=0, description="publishing is refused when less than this is free"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _duration(cls, value: Any, info: ValidationInfo) -> Any:
        is_duration = info.field_name is not None and info.field_name.endswith("_ms")
        if is_duration and isinstance(value, str) and not _NUMBER.fullmatch(value):
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
        """A message that is due sooner than this goes to the wheel before it is filed; filing takes
        up to 1.5 `file_ms` and the time of one checkpoint."""
        return 5 * min(self.file_ms, self.checkpoint_ms)

    @property
    def kept_ms(self) -> int:
        """A settled hour is kept so long after its end. Its keys go with it, so it stays until the
        dedupe window of the hour's last message has passed."""
        return max(self.retention_ms, self.dedupe_window_ms)

    def of_shard(self, data_dir: Path) -> "Settings":
        """The settings of one shard, which has its data in `data_dir`: a limit of the whole
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


def by_heading() -> dict[Heading, tuple[str, ...]]:
    """The names of the settings under each heading."""
    names: dict[Heading, list[str]] = {heading: [] for heading in Heading}
    for name, field in Settings.model_fields.items():
        (heading,) = (one for one in field.metadata if isinstance(one, Heading))
        names[heading].append(name)
    return {heading: tuple(found) for heading, found in names.items()}
