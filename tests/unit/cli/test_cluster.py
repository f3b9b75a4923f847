"""cluster create, cluster status: what they refuse before they ask a broker. (On brokers:
tests/cluster.)"""

import sys

import pytest

URL = "kafka://127.0.0.1:1/c"


def test_a_url_that_is_none(cli):
    done = cli.run("cluster", "status", "--cluster", "kafka://here")
    assert done.exit_code == 2
    assert "write it like kafka://broker1:9092" in done.stderr


def test_a_durability_that_is_none(cli):
    words = ("cluster", "create", "--cluster", URL, "--shards", "1", "--durability", "much")
    done = cli.run(*words)
    assert done.exit_code == 2
    assert "is not os, fsync or fsync-all" in done.stderr


def test_a_setting_that_is_refused(cli, tmp_path):
    path = tmp_path / "client.properties"
    path.write_text("acks=1")
    done = cli.run("cluster", "status", "--cluster", URL, "--kafka-config", str(path))
    assert done.exit_code == 2
    assert "acks may not be set" in done.stderr


@pytest.mark.parametrize("command", [("create", "--shards", "1"), ("status",)])
def test_without_the_extra(cli, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    monkeypatch.delitem(sys.modules, "storage.replicated.kafka", raising=False)
    done = cli.run("cluster", *command, "--cluster", URL)
    assert done.exit_code == 2
    assert "pip install 'delayserver[kafka]'" in done.stderr
