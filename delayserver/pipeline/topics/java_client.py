"""The settings that brokers want of clients (SASL, TLS), in the words of Spark's client.

    --kafka-config FILE    key=value lines of librdkafka, as servers and `delayserver cluster` take
                           them ──▶ options `kafka.…` of Spark's source, whose client is Java's

Certificates and keys go as their text, so no executor needs the files. A line without a counterpart
is refused, because leaving it out would make a client other than the intended one.

Cost: none. Threads: functions of values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from storage.errors import EngineSettingsError

_LOGINS: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_FILES: Final = {
    "ssl.ca.location": ("ssl.truststore.type", "ssl.truststore.certificates"),
    "ssl.certificate.location": ("ssl.keystore.type", "ssl.keystore.certificate.chain"),
    "ssl.key.location": ("ssl.keystore.type", "ssl.keystore.key"),
}
"""Files in PEM, and the settings that take their content."""


def java_settings(properties: Mapping[str, str]) -> dict[str, str]:
    """The settings of a Java client that connects as one of librdkafka with these does.

    Raises EngineSettingsError for a setting without a counterpart, and for a file that cannot be
    read."""
    rest = dict(properties)
    settings = {}
    if protocol := rest.pop("security.protocol", None):
        settings["security.protocol"] = protocol.upper()
    mechanism = rest.pop("sasl.mechanism", None) or rest.pop("sasl.mechanisms", None)
    name, password = rest.pop("sasl.username", None), rest.pop("sasl.password", None)
    if mechanism is not None:
        module = _LOGINS.get(mechanism.upper())
        if module is None or name is None or password is None:
            raise _refused(f"sasl.mechanism {mechanism}", "its name and password are not all")
        login = f"username={_quoted(name)} password={_quoted(password)}"
        settings["sasl.mechanism"] = mechanism.upper()
        settings["sasl.jaas.config"] = f"{module} required {login};"
    elif name is not None or password is not None:
        raise _refused("sasl.username, or sasl.password, without a mechanism", "nobody asks for it")
    for known, (store, content) in _FILES.items():
        if path := rest.pop(known, None):
            settings |= {store: "PEM", content: _text(known, path)}
    if secret := rest.pop("ssl.key.password", None):
        settings["ssl.key.password"] = secret
    if rest:
        raise _refused(", ".join(sorted(rest)), "Spark's client has no such setting")
    return settings


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(name: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise EngineSettingsError(f"{name}={path}", reason, "give a file in PEM") from error


def _refused(what: str, reason: str) -> EngineSettingsError:
    advice = "give a file with security.protocol, sasl.… and ssl.… alone"
    return EngineSettingsError(f"the settings of Kafka's clients: {what}", reason, advice)
