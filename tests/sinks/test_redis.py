"""Subscriptions of type redis, with a real Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from delayserver.delivery.redis_sink import RedisOpener
from delayserver.delivery.sink import Result
from delayserver.records.subscriptions import RedisTarget
from tests.integration.api_support import ApiServer
from tests.sinks import tls
from tests.sinks.contract import QUICKLY, SinkContract
from tests.sinks.programs import ESCAPED, USER
from tests.sinks.redis_server import RedisServer
from tests.unit.fakes import subscription
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


class TestRedis(SinkContract):
    def test_a_stream_that_keeps_so_many(
        self, broker: RedisServer, server: ApiServer, name: str, path: str
    ) -> None:
        definition = {"subject": name, **broker.definition(name), "max_length": 100}
        assert server.ask("PUT", path, 201, json=definition)["max_length"] == 100
        batch = [{"subject": name, "body": n} for n in range(1000)]
        server.ask("POST", "/v1/messages/batch", 200, json=batch)
        last = f'delayserver_sink_results_total{{result="confirmed",subscription="{name}"}} 1000'
        wait_until(lambda: last in server.get("/metrics").text)
        assert 100 <= len(broker.read(name, 1)) < 400

    def test_tls(self, broker: RedisServer, name: str) -> None:
        def to(host: str, opener: RedisOpener) -> Result:
            url = f"rediss://{USER}:{ESCAPED}@{host}:{broker.tls_port}"
            target = RedisTarget(url, name)
            return tls.deliver(opener, subscription(type="redis", target=target))

        trusting = RedisOpener(tls.POLICY, broker.certificates.trusted.read_text())
        assert tls.is_confirmed(to("localhost", trusting))
        assert len(broker.read(name, 1)) == 1
        assert tls.is_refused(to("127.0.0.1", trusting))
        assert tls.is_refused(to("localhost", RedisOpener(tls.POLICY)))
        assert len(broker.read(name, 1)) == 1

    def test_two_shards(self, broker: RedisServer, name: str, tmp_path: Path) -> None:
        with ApiServer(tmp_path, shards=2) as server:
            server.start()
            try:
                path = f"/v1/subscriptions/{name}"
                server.ask("PUT", path, 201, json={"subject": name, **broker.definition(name)})
                batch = [{"subject": name, "body": n, "key": f"k{n}"} for n in range(200)]
                ids = server.ask("POST", "/v1/messages/batch", 200, json=batch)["ids"]
                assert {entry.id for entry in broker.read(name, 200)} == set(ids)
                for id_ in ids[:5]:
                    server.recorded(id_)
                # A connection of each shard, which goes with the subscription.
                assert broker.connections() >= 2
                server.delete(path)
            finally:
                server.shut_down()

    def test_a_server_without_the_client(
        self, broker: RedisServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was there when the subscription was made."""
        hidden = tmp_path / "hidden" / "redis"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden by a test')")
        with ApiServer(tmp_path) as server:
            server.start()
            try:
                definition = {"subject": name, **broker.definition(name), "retry": QUICKLY}
                server.ask("PUT", f"/v1/subscriptions/{name}", 201, json=definition)
                with monkeypatch.context() as patch:
                    patch.setenv("PYTHONPATH", str(hidden.parent))
                    server.restart()
                id_ = server.publish(name, body=1)["id"]
                failed = 'delayserver_sink_results_total{result="failed"'
                wait_until(lambda: failed in server.get("/metrics").text)
                assert "a client is missing" in server.log
                server.restart()
                assert [entry.id for entry in broker.read(name, 1)] == [id_]
                server.recorded(id_)
            finally:
                server.shut_down()

    def test_what_is_refused(self, broker: RedisServer, server: ApiServer) -> None:
        good = {"subject": "s", **broker.definition("due-x")}

        def refused(**changes: object) -> tuple[str, str]:
            document = {**good, **changes}
            answer = server.ask("PUT", "/v1/subscriptions/bad", 422, json=document)
            (error,) = answer["errors"]
            return error["pointer"], error["detail"]

        pointer, detail = refused(url="redis://redis.example:6379")
        assert pointer == "/url" and "webhook_targets" in detail
        assert refused(url="redis://10.0.0.1")[0] == "/url"
        for url in ("http://127.0.0.1/", "redis://127.0.0.1/a", "redis://u:***@127.0.0.1"):
            assert refused(url=url)[0] == "/url"
        assert refused(stream="")[0] == "/stream"
        assert refused(max_length=0)[0] == "/max_length"
        assert refused(topic="t")[0] == "/topic"
        assert refused(batch={"max": 3})[0] == "/batch"
        del good["stream"]
        assert refused()[0] == "/stream"
