"""Settings of librdkafka in the words of Java's client. That brokers take them: test_cluster."""

from pathlib import Path

import pytest

from delayserver.pipeline.topics.java_client import java_settings
from storage.errors import EngineSettingsError


def test_names_and_files(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"-----{name}-----\n")
    properties = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanisms": "scram-sha-512",
        "sasl.username": "node",
        "sasl.password": 'a"b\\c',
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.certificate.location": str(tmp_path / "cert"),
        "ssl.key.location": str(tmp_path / "key"),
        "ssl.key.password": "p",
    }
    assert java_settings(properties) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required "
            'username="node" password="a\\"b\\\\c";'
        ),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": "-----ca-----\n",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "-----cert-----\n",
        "ssl.keystore.key": "-----key-----\n",
        "ssl.key.password": "p",
    }
    assert java_settings({}) == {}


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification"),
        ({"sasl.mechanism": "OAUTHBEARER"}, "sasl.mechanism OAUTHBEARER"),
        ({"sasl.mechanism": "PLAIN", "sasl.username": "n"}, "its name and password are not all"),
        ({"sasl.username": "n"}, "sasl.username, or sasl.password, without a mechanism"),
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "No such file"),
    ],
)
def test_what_has_no_counterpart_is_refused(properties: dict[str, str], said: str) -> None:
    with pytest.raises(EngineSettingsError, match=said):
        java_settings(properties)
