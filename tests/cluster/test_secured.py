"""Brokers that want TLS and a password, and that let the nodes do what docs/cluster.md says and no
more."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trustme
from confluent_kafka import Consumer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.delivery.kafka_sink import KafkaOpener
from delayserver.delivery.sink import Result
from delayserver.parts.sources.feeds import Batch, FeedError
from delayserver.parts.sources.kafka_source import KafkaFeed, TopicIds
from delayserver.parts.sources.records import Source, SourceState
from delayserver.records.named import Known
from delayserver.records.subscriptions import KafkaTarget
from storage.replicated.kafka_settings import sink_settings
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, delayserver, running, until
from tests.cluster.topics import Reader
from tests.sinks import tls
from tests.unit.fakes import subscription

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNNER = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
GRANTS = {
    ResourceType.TOPIC: ["READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "DELETE", "CREATE"],
    ResourceType.GROUP: ["READ"],
    ResourceType.TRANSACTIONAL_ID: ["WRITE"],
}
"""What docs/cluster.md has an operator give to the nodes of a cluster, of all that begins with its
name."""


class Secured:
    """One broker, and two who may log in: `admin` may do anything, and `node` what it was given."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        keys, self.authority = directory / "broker.pem", directory / "authority.pem"
        # The brokers want the key as PKCS #8.
        key = load_pem_private_key(issued.private_key_pem.bytes(), None)
        form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        certificates = b"".join(one.bytes() for one in issued.cert_chain_pems)
        keys.write_bytes(key.private_bytes(*form) + certificates)
        authority.cert_pem.write_to_path(str(self.authority))
        login = f'{MODULE} required username="admin" password="a" user_admin="a" user_node="n";'
        self.brokers = Brokers(
            directory / "brokers",
            count=1,
            settings=(
                "listener.security.protocol.map=BROKER:SASL_SSL,CONTROLLER:PLAINTEXT",
                "sasl.enabled.mechanisms=PLAIN",
                "sasl.mechanism.inter.broker.protocol=PLAIN",
                f"listener.name.broker.plain.sasl.jaas.config={login}",
                *("ssl.keystore.type=PEM", f"ssl.keystore.location={keys}"),
                *("ssl.truststore.type=PEM", f"ssl.truststore.location={self.authority}"),
                f"authorizer.class.name={AUTHORIZER}",
                # The controller talks to itself without a name.
                "super.users=User:admin;User:ANONYMOUS",
            ),
        )

    def login(self, name: str, password: str) -> dict[str, str]:
        """Settings of a client."""
        return {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "PLAIN",
            "sasl.username": name,
            "sasl.password": password,
            "ssl.ca.location": str(self.authority),
        }

    @cached_property
    def admin(self) -> AdminClient:
        """Who may do anything."""
        bootstrap = {"bootstrap.servers": ",".join(self.brokers.addresses)}
        return AdminClient({**self.login("admin", "a"), **bootstrap})

    def make_topic(self, name: str) -> str:
        """A topic of one partition; its name."""
        self.admin.create_topics([NewTopic(name, 1, 1)])[name].result()
        return name

    def grant(self, name: str, topic: str) -> None:
        """Let the nodes of a cluster of that name do what they have to, and deliver to a topic."""
        patterns = [
            (kind, f"{name}.", ResourcePatternType.PREFIXED, operations)
            for kind, operations in GRANTS.items()
        ]
        patterns.append((ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, ["WRITE"]))
        bindings = [
            AclBinding(
                kind, pattern, how, "User:node", "*", AclOperation[one], AclPermissionType.ALLOW
            )
            for kind, pattern, how, operations in patterns
            for one in operations
        ]
        for asked in self.admin.create_acls(bindings).values():
            asked.result(30)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"))
    with made.brokers.running():
        yield made


def properties(path: Path, settings: dict[str, str]) -> str:
    """A file for --kafka-config."""
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return str(path)


def refused(*words: str) -> str:
    """What is said by a command that cannot be done."""
    done = RUNNER.invoke(make_app(("cluster",)), ["cluster", *words])
    assert done.exit_code == 2, done.output
    return done.stderr


def test_a_cluster_on_brokers_that_want_tls_and_a_password(
    secured: Secured, tmp_path: Path
) -> None:
    brokers = secured.brokers
    url = brokers.new_url()
    own = properties(tmp_path / "node.properties", secured.login("node", "n"))
    wrong = properties(tmp_path / "wrong.properties", secured.login("node", "x"))
    where = ("--cluster", str(url))

    # ── what is wrong is said ──
    assert "Authentication failed" in refused("status", *where, "--kafka-config", wrong)
    create = ("create", *where, "--kafka-config", own, "--shards", "1", "--replication", "1")
    assert "authorization failed" in refused(*create).lower()

    # ── what docs/cluster.md has given is enough ──
    topic = secured.make_topic(f"due-of-{url.name}")
    secured.grant(url.name, topic)
    delayserver("cluster", *create)
    node = NodeProcess("n1", url, tmp_path)
    node.options += ["--kafka-config", own]
    with running(node):
        subscription = {
            "subject": "order.late",
            "type": "kafka",
            "bootstrap": ",".join(brokers.addresses),
            "topic": topic,
            "delivery": "exactly_once",
        }
        node.call("PUT", "/v1/subscriptions/out", subscription)
        published = node.publish("k", delay="100ms")
        until(
            lambda: node.call("GET", f"/v1/messages/{published}")["state"] == "delivered",
            "it is in the topic, and that is recorded",
        )
        status = json.loads(
            delayserver("cluster", "status", *where, "--kafka-config", own, "--json")
        )
        assert status["shards"][0]["owner"] == "n1"
        assert status["problems"] == []
        assert node.stop() == 0
    reader = Reader(brokers, topic, secured.login("admin", "a"))
    assert [one.id for one in reader.read(1)] == [published]
    reader.close()


def test_sinks_and_sources_want_a_certificate_that_they_trust(secured: Secured) -> None:
    """As the system's certificates are trusted, which a test cannot add to."""
    brokers, trusted = secured.brokers, {"ssl.ca.location": str(secured.authority)}
    (bootstrap,) = brokers.addresses
    target = KafkaTarget(
        bootstrap, secured.make_topic("over-tls"), username="admin", password="a", tls=True
    )

    # ── a sink ──
    def trusting(bootstrap: str, timeout_ms: int) -> dict[str, Any]:
        return {**sink_settings(bootstrap, timeout_ms), **trusted}

    def sent(opener: KafkaOpener, **changes: str) -> Result:
        to = msgspec.structs.replace(target, **changes)
        return tls.deliver(opener, subscription(type="kafka", timeout_ms=10_000, target=to))

    assert tls.is_confirmed(sent(KafkaOpener(tls.POLICY, trusting)))
    assert tls.is_refused(sent(KafkaOpener(tls.POLICY)))
    # The certificate is for the address.
    port = bootstrap.rpartition(":")[2]
    elsewhere = f"localhost:{port}"
    assert tls.is_refused(sent(KafkaOpener(tls.POLICY, trusting), bootstrap=elsewhere))

    # ── a source ──
    def read(password: str = "a", **more: str) -> Batch:
        async def main() -> Batch:
            to = msgspec.structs.replace(target, password=password)
            source = Source("in", 1, to, "due", "group-over-tls")
            loop = asyncio.get_running_loop()
            feed = KafkaFeed(
                Known(source, SourceState(1, 1, 0)),
                tls.POLICY,
                loop,
                lambda reason: None,
                lambda settings: Consumer({**settings, **more}),
                lambda settings: TopicIds({**settings, **more}),
            )
            try:
                async with asyncio.timeout(60):
                    return await feed.read()
            finally:
                await feed.close()

        return asyncio.run(main())

    (record,) = read(**trusted)
    assert dict(record.headers)["delay-attempt"] == b"1"
    with pytest.raises(FeedError, match="certificate"):
        read()
    with pytest.raises(FeedError, match="uthentication"):
        read("x", **trusted)
