"""Traffic of a cluster: each call goes to any node, and the sender of each webhook is told by its
address.

Cost: as `tests.harness.traffic`. Threads: belongs to the event loop.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from delayserver.cli.demo.ledger import Receipt
from delayserver.cli.demo.receiver import PEER
from tests.chaos.cluster import Cluster
from tests.chaos.strikes import Strike
from tests.harness.traffic import Traffic


class ClusterTraffic(Traffic):
    """Clients that know all nodes. All falls due within the run: a cluster's clock is not set
    forward."""

    CONSUMERS = 1
    PAUSE_S = 0.08
    MIXED_SHARE = 0.5

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster.notes, cluster.client, seed)
        self._stage = cluster.stage

    def _is_refusal(self, status: int, answer: Any) -> bool:
        is_full = status == HTTPStatus.INSUFFICIENT_STORAGE
        may_be_full = self.notes.doing == Strike.DISK_FULL
        return (is_full and may_be_full) or super()._is_refusal(status, answer)

    def _on_delivered(self, headers: Mapping[str, str], body: bytes) -> Receipt:
        if (node := self._stage.name_of(headers[PEER])) is not None:
            self.ledger.delivered_by(node, headers.get("webhook-id", ""))
        return super()._on_delivered(headers, body)

    def _on_pulled(self, name: str, message: Mapping[str, Any]) -> Receipt:
        self.ledger.pulled(message["lease"])
        return super()._on_pulled(name, message)

    def _delay_ms(self) -> int:
        chance = self._random
        kind = chance.random()
        if kind < 0.1:
            return 0
        if kind < 0.4:
            return chance.randint(1, 300)
        return chance.randint(300, 4000 if kind < 0.9 else 15_000)
