"""Where a cluster's logs are, and how the clients of its brokers are set up.

    kafka://HOST:PORT[,HOST:PORT…]/NAME

names brokers to begin with (the others are found through them) and the cluster, whose topics are
NAME.log, NAME.settled and NAME.meta. Other settings that brokers need (SASL, TLS) stand in a file
of lines `key=value`, in the words of librdkafka. A line that would break a promise of the logs is
refused.

Every setting of ours stands here with its reason. Most of them are about brokers that die or hang.
With librdkafka's own time-outs a broker that hangs (SIGSTOP, a disk that stalls) costs 71 s of
silence, with these 4 to 6 s. The brokers themselves need as long to elect another leader (measured
with `broker.session.timeout.ms=3000`; their default adds 6 s).

Cost: none. Threads: values that do not change. Nothing here needs a Kafka client to be installed,
so an URL can be checked where none is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from storage.errors import EngineSettingsError
from storage.replicated.meta import NAME_PATTERN

SCHEME: Final = "kafka://"
EXAMPLE: Final = "kafka://broker1:9092,broker2:9092/delays"
NAME: Final = re.compile(NAME_PATTERN)
PORT_MAX: Final = (1 << 16) - 1
MESSAGE_TIMEOUT_MS: Final = 120_000
MESSAGE_MAX_BYTES: Final = 1_000_000
"""The most that a producer sends at once, and so the least that a topic has to take: librdkafka's
default, and less than the brokers' (1 MiB). A record of the log (900 KiB and an envelope) fits."""

_BROKER = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

_OF_ALL: Final[dict[str, str | int | bool]] = {
    # How long an answer may take. The default is 60 s. For so long a broker that hangs keeps the
    # requests that were sent to it, though the partition has another leader after some 4 s.
    "socket.timeout.ms": 3000,
    # A process that was stopped still accepts connections (its kernel does) and then says nothing.
    # The default is 30 s ...
    "socket.connection.setup.timeout.ms": 1500,
    # ... and this is the first thing that is asked on a new connection: 10 s.
    "api.version.request.timeout.ms": 1500,
    # A broker that was away is found a second after it is back, and not up to 10 s later. Each
    # repetition has a floor and grows: a node has some forty connections, and a broker that is away
    # must not cost the processor time that the others need to take its place.
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    # A partition that has lost its leader is asked about in these intervals until it has another.
    "topic.metadata.refresh.fast.interval.ms": 100,
    "retry.backoff.ms": 50,
    "retry.backoff.max.ms": 500,
    # A leader that has moved without a failed request is noticed, too: the default is 5 minutes.
    "topic.metadata.refresh.interval.ms": 10_000,
    # Kept connections: a load balancer or a firewall between would drop silent ones unnoticed.
    "socket.keepalive.enable": True,
    # Connections that a broker closes because they were idle are no news.
    "log.connection.close": False,
    "client.id": "delayserver",
}
_OF_ADMINS: Final[dict[str, str | int | bool]] = {
    # Which broker leads a partition is asked again when it is a second old. An admin client does
    # not learn it from a request that fails: it would go on asking the one that was killed, for 15
    # minutes by default.
    "metadata.max.age.ms": 1000,
}
_OF_PRODUCERS: Final[dict[str, str | int | bool]] = {
    # An append is answered when a quorum has it (`min.insync.replicas` of the topic), and a retry
    # of the client is written once.
    "acks": "all",
    "enable.idempotence": True,
    # One request under way. Up to five keep the order, too, but a group is one record already, and
    # four under way brought nothing (measured: 690 groups of 128 per second either way).
    "max.in.flight.requests.per.connection": 1,
    # The owner waits for the answer to each append: no other record comes that is worth waiting
    # for.
    "linger.ms": 0,
    # How long the leader may wait for the other replicas. The default is 30 s; less than
    # socket.timeout.ms, so that the leader answers before it is given up.
    "request.timeout.ms": 2500,
    "message.max.bytes": MESSAGE_MAX_BYTES,
}
_OF_OTHERS: Final[dict[str, str | int | bool]] = {
    # Brokers of another operator may be away for days. The pauses between attempts grow as they do
    # by default, and a broker that is back is found within five seconds.
    "reconnect.backoff.ms": 100,
    "reconnect.backoff.max.ms": 5000,
    "topic.metadata.refresh.fast.interval.ms": 250,
    "retry.backoff.ms": 100,
    "retry.backoff.max.ms": 1000,
}
_OF_SINKS: Final[dict[str, str | int | bool]] = {
    # A message counts as delivered when a quorum has it. One that the client sends again is there
    # once. Up to five requests under way keep the order of a partition.
    "acks": "all",
    "enable.idempotence": True,
    "max.in.flight.requests.per.connection": 5,
    # Messages due in the same millisecond share a request, and none is late by more than that.
    "linger.ms": 1,
    "request.timeout.ms": 2500,
    # The topic decides which message is too long, so that its setting alone counts. It refuses a
    # whole batch for one, so batches are short: as those of Java clients.
    "message.max.bytes": 1_000_000_000,
    "batch.size": 16 << 10,
    # More than the window of an outlet, which is what bounds them (`delivery.kafka_sink`).
    "queue.buffering.max.messages": 50_000,
    "queue.buffering.max.kbytes": 128 << 10,
    # A missing topic is named as such. With the default of 30 s the message's own time is up first,
    # and the operator learns nothing.
    "topic.metadata.propagation.max.ms": 3000,
    # The same key goes to the same partition as from a Java client.
    "partitioner": "murmur2_random",
}
_OF_CONSUMERS: Final[dict[str, str | int | bool]] = {
    # There is no group: partitions are assigned, and progress is committed elsewhere. A consumer
    # needs a name for it nevertheless.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # An offset that the log does not hold is an error, and never another offset.
    "auto.offset.reset": "error",
    # These logs have no transactions, except the log of settled deliveries. With `read_committed` a
    # transaction that was opened here by mistake would hide all records that follow.
    "isolation.level": "read_uncommitted",
    # A record is sent as soon as a quorum has it. The broker keeps a request for so long if there
    # is none; a consumer that goes to another offset waits for the end of that request.
    "fetch.min.bytes": 1,
    "fetch.wait.max.ms": 100,
    # A follower that is behind reads large pieces: 1 MiB, the default, is less than a message log
    # gets in 10 ms.
    "max.partition.fetch.bytes": 8 << 20,
    # The bytes that are read ahead. It bounds the memory of a log that is behind, ...
    "queued.max.messages.kbytes": 32 << 10,
    # ... and this says after how long a full queue is looked at again. The default, 1 s, would
    # bound the rate at 32 MiB/s.
    "fetch.queue.backoff.ms": 5,
    # After an error of a fetch, such as of a leader that has moved: 500 ms otherwise.
    "fetch.error.backoff.ms": 100,
}

_OF_SOURCES: Final[dict[str, str | int | bool]] = {
    # Records of a transaction are published when it is committed, and never if it is not.
    "isolation.level": "read_committed",
    # There may be a hundred sources, so each reads ahead less than a log does.
    "queued.max.messages.kbytes": 4 << 10,
    "max.partition.fetch.bytes": 1 << 20,
    # The markers of transactions are no records. How far a topic was read is told by this.
    "enable.partition.eof": True,
    # A topic gets its records from other producers: an idle one need not be asked ten times a
    # second.
    "fetch.wait.max.ms": 500,
    "fetch.error.backoff.ms": 200,
}

_OF_TRANSACTIONAL_LOGS: Final[dict[str, str | int | bool]] = {
    # Records of a transaction count when it is committed, and never if it is not. Records behind an
    # open transaction are not given out before it has ended.
    "isolation.level": "read_committed",
    # The markers of transactions are no records. This tells that a log was read to its end.
    "enable.partition.eof": True,
}
_OF_TRANSACTIONS: Final[dict[str, str | int | bool]] = {
    # An owner that was killed leaves one open. The next owner ends it; if there is none, the
    # brokers do after this time, and readers of the topics wait until then.
    "transaction.timeout.ms": 30_000,
    # Has to be shorter.
    "message.timeout.ms": 20_000,
    # The batch is complete when it is written.
    "linger.ms": 0,
}

_PROMISED = "it is set by the cluster, which counts on it"
_BY_URL = "the brokers stand in the URL"
_NO_GROUP = "no consumer group may move partitions or offsets"
_NO_TRANSACTION = "the markers of transactions take offsets of the logs, which may have no gaps"
REFUSED: Final = {
    "acks": _PROMISED,
    "request.required.acks": _PROMISED,
    "enable.idempotence": _PROMISED,
    "enable.gapless.guarantee": _PROMISED,
    "max.in.flight": _PROMISED,
    "max.in.flight.requests.per.connection": _PROMISED,
    "message.timeout.ms": _PROMISED,
    "delivery.timeout.ms": _PROMISED,
    "message.send.max.retries": _PROMISED,
    "retries": _PROMISED,
    "message.max.bytes": _PROMISED,
    "auto.offset.reset": _PROMISED,
    "isolation.level": _PROMISED,
    "enable.partition.eof": _PROMISED,
    "enable.auto.commit": _NO_GROUP,
    "enable.auto.offset.store": _NO_GROUP,
    "auto.commit.enable": _NO_GROUP,
    "group.id": _NO_GROUP,
    "group.instance.id": _NO_GROUP,
    "group.protocol": _NO_GROUP,
    "transactional.id": _NO_TRANSACTION,
    "bootstrap.servers": _BY_URL,
    "metadata.broker.list": _BY_URL,
}
"""Settings that a file may not have, and why."""


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """Where the logs of a cluster are: brokers to begin with, and the cluster's name."""

    brokers: tuple[str, ...]
    """Each `host:port`."""
    name: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL. Raises EngineSettingsError."""
        if not url.startswith(SCHEME):
            raise _bad_url(url, f"it does not begin with {SCHEME}")
        addresses, slash, name = url.removeprefix(SCHEME).partition("/")
        if not slash or not NAME.fullmatch(name):
            reason = (
                "behind the brokers stands the cluster's name: up to 64 letters, digits, '.', '_' "
                "and '-', a letter or a digit first"
            )
            raise _bad_url(url, reason)
        brokers = tuple(addresses.split(","))
        for broker in brokers:
            found = _BROKER.fullmatch(broker)
            if found is None or not 0 < int(found["port"]) <= PORT_MAX:
                raise _bad_url(url, f"{broker!r} is not HOST:PORT")
        return cls(brokers, name)

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.brokers)}/{self.name}"

    @property
    def log_topic(self) -> str:
        """The message logs, a partition for each shard."""
        return f"{self.name}.log"

    @property
    def settled_topic(self) -> str:
        """The topic of settled deliveries, a partition for each shard."""
        return f"{self.name}.settled"

    @property
    def meta_topic(self) -> str:
        """The topic that describes the cluster, in one partition."""
        return f"{self.name}.meta"

    def progress_group(self, node: str) -> str:
        """The group whose offsets are the progress of a node."""
        assert NAME.fullmatch(node), node
        return f"{self.name}.{node}"


def _bad_url(url: str, reason: str) -> EngineSettingsError:
    return EngineSettingsError(f"the cluster {url!r}", reason, f"write it like {EXAMPLE}")


def read_properties(path: Path) -> dict[str, str]:
    """The settings in a file of lines `key=value`; `#` begins a comment line.

    Raises EngineSettingsError. The client that gets a key judges its value."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise EngineSettingsError(str(path), reason, "give a file of key=value lines") from error
    settings: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        where = f"{path}, line {number}"
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not key:
            reason = f"{line!r} is not key=value"
            raise EngineSettingsError(where, reason, "correct the line, or remove it")
        if key in settings:
            raise EngineSettingsError(where, f"{key} stands there twice", "remove one of the lines")
        if key in REFUSED:
            reason = f"{key} may not be set: {REFUSED[key]}"
            raise EngineSettingsError(where, reason, "remove the line")
        settings[key] = value
    return settings


def sink_settings(
    bootstrap: str, timeout_ms: int, properties: Mapping[str, str] | None = None
) -> dict[str, str | int | bool]:
    """The settings of a producer of messages to another operator's topics.

    `timeout_ms`: when it gives a message up. `properties`: from `read_properties`, only for the
    brokers that they are meant for: they hold secrets."""
    own: dict[str, str | int | bool] = {
        "bootstrap.servers": bootstrap,
        "message.timeout.ms": timeout_ms,
    }
    return {**_OF_ALL, **_OF_OTHERS, **_OF_SINKS, **own, **(properties or {})}


def source_settings(bootstrap: str, group: str) -> dict[str, str | int | bool]:
    """The settings of a consumer of a foreign topic. `group`: its offsets show the progress."""
    own: dict[str, str | int | bool] = {"bootstrap.servers": bootstrap, "group.id": group}
    return {**_OF_ALL, **_OF_OTHERS, **_OF_CONSUMERS, **_OF_SOURCES, **own}


def admin_settings(bootstrap: str) -> dict[str, str | int | bool]:
    """The settings of a client that asks brokers of another operator about a topic."""
    return {**_OF_ALL, **_OF_OTHERS, **_OF_ADMINS, "bootstrap.servers": bootstrap}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of each kind of client. A file's lines go before ours where they may."""

    url: ClusterUrl
    properties: Mapping[str, str]
    """From `read_properties`."""
    message_timeout_ms: int = MESSAGE_TIMEOUT_MS
    """How long an append may take. An owner whose partition has no leader waits for the next one,
    and then still is the owner: two minutes are longer than any election."""

    def __post_init__(self) -> None:
        assert not REFUSED.keys() & self.properties.keys(), self.properties

    def of_admin(self) -> dict[str, str | int | bool]:
        """The settings for requests to brokers other than reading and appending."""
        return self._merged(_OF_ADMINS)

    def of_producer(self) -> dict[str, str | int | bool]:
        """For appends to a log."""
        return self._merged(_OF_PRODUCERS | {"message.timeout.ms": self.message_timeout_ms})

    def of_consumer(self, *, is_transactional: bool = False) -> dict[str, str | int | bool]:
        """For reading a log; `is_transactional`: some of it was written in transactions."""
        more = _OF_TRANSACTIONAL_LOGS if is_transactional else {}
        # Nothing is committed there. Its name begins as those of the others do, so that brokers
        # allow all of them by one rule.
        return self._merged(_OF_CONSUMERS | more | {"group.id": f"{self.url.name}.readers"})

    def of_transactions(self, name: str) -> dict[str, str | int | bool]:
        """For writing in transactions under that name, one after the other."""
        return self._merged(_OF_SINKS | _OF_TRANSACTIONS | {"transactional.id": name})

    def without_properties(self) -> Self:
        """For brokers that are not those of the cluster, perhaps."""
        return replace(self, properties={})

    def _merged(self, own: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        brokers = {"bootstrap.servers": ",".join(self.url.brokers)}
        return {**_OF_ALL, **own, **brokers, **self.properties}
