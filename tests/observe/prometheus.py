"""A real Prometheus of Debian's on loopback, and what it scrapes that is no server."""

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from delayserver.config import Settings
from delayserver.parts.sources.sourcing import Sourcing
from delayserver.server.gauges import Gauges
from delayserver.shards.exposition import merge_metrics, standby_metrics
from tests.observe.rules import shortened, yaml
from tests.sinks.programs import Program, need
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SCRAPE, EVALUATION = "300ms", "200ms"


class Prometheus(Program):
    """One that scrapes often, with the rules shortened."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._targets = directory / "targets.json"
        self.scrape({})
        (directory / "alerts.yml").write_text(shortened())
        config = {
            "global": {
                "scrape_interval": SCRAPE,
                "scrape_timeout": SCRAPE,
                "evaluation_interval": EVALUATION,
            },
            "rule_files": ["alerts.yml"],
            "scrape_configs": [
                {
                    "job_name": "from the file",
                    "file_sd_configs": [
                        {"files": [self._targets.name], "refresh_interval": "1s"},
                    ],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api/v1", timeout=30)

    def command(self) -> list[str]:
        return [
            need("prometheus", "ensure_prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def is_ready(self) -> bool:
        # It listens before it answers.
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def scrape(self, ports: dict[str, int]) -> None:
        """Scrape these from now on, and nothing else: ports of loopback by job."""
        document = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"job": job}}
            for job, port in ports.items()
        ]
        # In one step: it is read as soon as it is another.
        part = self._targets.with_suffix(".part")
        part.write_text(json.dumps(document))
        part.rename(self._targets)

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, (query, answer.text)
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """What a query returns now, by no order; nothing that is not a number."""
        found = self.ask("/query", query=expression)["result"]
        values = [float(one["value"][1]) for one in found]
        return [value for value in values if not math.isnan(value)]

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """The alerts that fire now, by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self.ask("/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def __exit__(self, *details: object) -> None:
        self.client.close()
        super().__exit__(*details)


class Node:
    """What a node of a cluster shows where little is well: an owner of shard 0, which loses its
    office again and again and is cut off, and a standby of shard 2; nobody owns shard 1.

    The texts are those of the server's own code, over a server that is simulated, since a cluster
    takes longer to start than all tests of this folder. tests/cluster shows the same alerts what
    real nodes show."""

    def __init__(self) -> None:
        self._clock = SimulatedClock()
        settings = Settings()
        server = SimulatedServer(
            *(settings, SimulatedFiles(), MemoryCatalog(), self._clock),
            *(random.Random(0), Observer()),
        )
        self._sources = server.engine.part(Sourcing)
        self._sources.not_understood["orders"] = "it has 1 fields that are not known here"
        metrics = Gauges(server.engine, settings, self._clock).metrics
        self._epoch = 0
        metrics.gauge("office_epoch", "Which owner", lambda: self._epoch)
        metrics.gauge("office_lease", "Whether it may deliver", lambda: 0)
        metrics.gauge("office_unread_records", "Records", lambda: 7)
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = node.text().encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def text(self) -> str:
        """What it shows; time has passed since it was asked last."""
        self._epoch += 1
        self._sources.skipped_total += 1
        owned = merge_metrics({0: generate_latest(self._registry).decode(), 1: None})
        return owned + standby_metrics(
            2, lag_records=70_000, lag_s=61.5, unseen_nodes=1, clock_differs=True, has_replica=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
