"""Brokers that want TLS and a password, and that let the nodes do what docs/cluster.md says and no
more."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING

import pytest
import trustme
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
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, delayserver, running, until
from tests.cluster.topics import Reader

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


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    made = Secured(tmp_path)
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
    topic = f"due-of-{url.name}"
    secured.admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
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
