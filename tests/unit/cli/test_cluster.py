"""cluster create, cluster status: what they refuse before they ask a broker. (On brokers:
tests/cluster.)"""

import sys

import pytest

from delayserver.cli.cluster.adopt import Reach, check_adoption
from delayserver.cli.session import CannotRun

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


def reach(node, seq=0, *, epoch=4, is_there=True, read_offset=0):
    return Reach(node, 0, is_there, read_offset, epoch if seq else 0, seq)


def refusal(*reaches, node="n1", may_lose=False):
    try:
        check_adoption(list(reaches), node, 100, may_lose=may_lose)
    except CannotRun as error:
        return str(error)
    return None


def test_a_log_goes_on_behind_the_replica_that_reaches_furthest():
    assert refusal(reach("n1", 70), reach("n2", 70), reach("n3")) is None
    refused = refusal(reach("n1", 70), reach("n2", 71))
    assert "another replica more: n2 up to seq 71" in refused
    assert refusal(reach("n1", 70), reach("n2", 71), may_lose=True) is None


def test_a_log_that_has_lost_nothing_is_left_alone():
    for may_lose in (False, True):
        assert "has lost nothing that n1 has" in refusal(reach("n1"), may_lose=may_lose)


def test_a_node_that_is_not_there_adopts_nothing():
    for reaches in ((), (reach("n1", 70, is_there=False),)):
        assert "n1 is not there: start it" in refusal(*reaches, may_lose=True)


def test_a_node_that_may_have_more_is_to_be_started_first():
    away = reach("n2", is_there=False, read_offset=101)
    assert "n2 had read more than the log has now" in refusal(reach("n1", 70), away)
    assert refusal(reach("n1", 70), away, may_lose=True) is None
    had_less = reach("n2", is_there=False, read_offset=100)
    assert refusal(reach("n1", 70), had_less) is None
