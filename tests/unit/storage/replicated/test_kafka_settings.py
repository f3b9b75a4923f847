"""What an URL and a file of settings say, and what is refused."""

from pathlib import Path

import pytest

from storage.errors import EngineSettingsError
from storage.replicated.kafka_settings import (
    REFUSED,
    ClientSettings,
    ClusterUrl,
    read_properties,
)


@pytest.mark.parametrize(
    ("text", "brokers", "name"),
    [
        ("kafka://b:9092/delays", ("b:9092",), "delays"),
        (
            "kafka://b1:1,b-2.example.org:65535/a.b-c_d",
            ("b1:1", "b-2.example.org:65535"),
            "a.b-c_d",
        ),
        ("kafka://[::1]:9092/0", ("[::1]:9092",), "0"),
        (f"kafka://b:9092/{'n' * 64}", ("b:9092",), "n" * 64),
    ],
)
def test_a_url(text: str, brokers: tuple[str, ...], name: str) -> None:
    url = ClusterUrl.parse(text)
    assert (url.brokers, url.name, str(url)) == (brokers, name, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://b:9092/delays", "does not begin with kafka://"),
        ("kafka://b:9092", "the cluster's name"),
        ("kafka://b:9092/", "the cluster's name"),
        ("kafka://b:9092/-delays", "the cluster's name"),
        ("kafka://b:9092/delays\n", "the cluster's name"),
        ("kafka://b:9092/delays/more", "the cluster's name"),
        ("kafka://b:9092/délais", "the cluster's name"),
        (f"kafka://b:9092/{'n' * 65}", "the cluster's name"),
        ("kafka:///delays", "'' is not HOST:PORT"),
        ("kafka://b/delays", "'b' is not HOST:PORT"),
        ("kafka://b:9092,/delays", "'' is not HOST:PORT"),
        ("kafka://b:0/delays", "'b:0' is not HOST:PORT"),
        ("kafka://b:65536/delays", "'b:65536' is not HOST:PORT"),
        ("kafka://user@b:9092/delays", "'user@b:9092' is not HOST:PORT"),
    ],
)
def test_what_is_no_url(text: str, why: str) -> None:
    with pytest.raises(EngineSettingsError) as refused:
        ClusterUrl.parse(text)
    assert why in str(refused.value)
    assert "write it like kafka://" in str(refused.value)


def test_names_of_topics_and_groups() -> None:
    url = ClusterUrl.parse("kafka://b:9092/delays")
    assert (url.log_topic, url.settled_topic, url.meta_topic) == (
        "delays.log",
        "delays.settled",
        "delays.meta",
    )
    assert url.progress_group("n1") == "delays.n1"


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(
        "# as the brokers want it\n\n security.protocol = SASL_SSL\nsasl.password=a=b c\nempty=\n"
    )
    assert read_properties(path) == {
        "security.protocol": "SASL_SSL",
        "sasl.password": "a=b c",
        "empty": "",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\nsecurity.protocol", "line 2: 'security.protocol' is not key=value"),
        ("=value", "line 1: '=value' is not key=value"),
        ("a=1\na=2", "line 2: a stands there twice"),
    ],
)
def test_a_file_with_a_wrong_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(text)
    with pytest.raises(EngineSettingsError) as refused:
        read_properties(path)
    assert f"{path}, {why}; " in str(refused.value)


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_would_break_a_promise(tmp_path: Path, key: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(f"{key}=1")
    with pytest.raises(EngineSettingsError, match="may not be set"):
        read_properties(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match="No such file"):
        read_properties(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe=\xff")
    with pytest.raises(EngineSettingsError, match="cannot be read"):
        read_properties(tmp_path / "binary")


def test_settings_of_the_clients() -> None:
    url = ClusterUrl.parse("kafka://b1:1,b2:2/delays")
    settings = ClientSettings(url, {"socket.timeout.ms": "9000"}, message_timeout_ms=7)
    kinds = (settings.of_admin(), settings.of_producer(), settings.of_consumer())
    for kind in kinds:
        assert kind["bootstrap.servers"] == "b1:1,b2:2"
        assert kind["socket.timeout.ms"] == "9000"
        assert kind["api.version.request.timeout.ms"] == 1500
    assert kinds[1]["acks"] == "all"
    assert kinds[1]["message.timeout.ms"] == 7
    assert kinds[2]["group.id"] == "delays.readers"


def test_all_that_is_promised_is_refused_in_a_file() -> None:
    """What makes a log of the client may not be set from outside."""
    settings = ClientSettings(ClusterUrl.parse("kafka://b:1/c"), {})
    for key in ("acks", "enable.idempotence", "message.timeout.ms", "message.max.bytes"):
        assert key in settings.of_producer()
        assert key in REFUSED
    for key in ("auto.offset.reset", "enable.auto.commit", "isolation.level", "group.id"):
        assert key in settings.of_consumer()
        assert key in REFUSED
