"""Messages and leases of consumers at one shard: each consumer gets due messages of any of them.

    pull             ──▶ Gathering ──▶ own part, and parts of others (`Demand`)
    ack, nack, extend ─▶ Endings   ──▶ each lease at the shard that has granted it
    from others      ──▶ Supply, Endings ──▶ the messages that they take, the leases that they end

A consumer waits where it came in, with all that wait for the own shard (`Fetches`), and is woken by
a row that falls due here, and by a word of another shard. The only shard of one has no others to
ask, and gives out its own. Cost: see these. Threads: belongs to the event loop.
"""

from collections.abc import Sequence

from delayserver.api.hot.consume import (
    AnswerCallback,
    Cancel,
    Ending,
    LeaseEnd,
    OwnGrants,
    PullCall,
)
from delayserver.records.subscriptions import Subscription
from delayserver.server.calls import Calls
from delayserver.shards.demand import Demand
from delayserver.shards.endings import Endings
from delayserver.shards.gathering import Gathering, PullSources
from delayserver.shards.local import Handler
from delayserver.shards.peers import Peers
from delayserver.shards.supply import Supply
from delayserver.wire.pulls import AckedDocument


class SharedGrants:
    """`Grants` of one shard for the messages of all of them."""

    def __init__(self, calls: Calls, peers: Peers) -> None:
        self._calls = calls
        own = OwnGrants(calls)
        self._supply = Supply(calls, peers)
        demand = Demand(calls, peers, self._look)
        self._sources = PullSources(calls, peers.own, peers.count, demand)
        self._endings = Endings(own, peers)
        is_only = peers.count == 1
        self.wait = own.wait if is_only else self._wait
        """See Grants."""
        self.end = own.end if is_only else self._endings.end
        """See Grants."""
        if not is_only:
            calls.consumers.when_ready(self._on_ready)

    @property
    def handlers(self) -> Sequence[Handler]:
        """The handlers of calls that come from other shards."""
        return (self._supply.answer, self._endings.answer)

    def _on_ready(self, subscription_id: int) -> None:
        self._look(subscription_id)
        self._supply.on_ready(subscription_id)

    def _look(self, subscription_id: int) -> None:
        """Complete the pulls for which there is enough, the oldest first."""
        calls, sources = self._calls, self._sources
        while (total := sources.total(subscription_id)) and (
            fetch := calls.consumers.oldest_wait(subscription_id, total)
        ):
            fetch.force_complete()

    def _wait(
        self,
        subscription: Subscription,
        asked: PullCall,
        leases: list[str] | None,
        tell: AnswerCallback,
    ) -> Cancel:
        calls = self._calls
        calls.consumers.check_handing_out()
        gathering = Gathering(self._sources, subscription, asked, tell)
        if leases is not None:

            def done(expired: list[str], error: Exception | None = None) -> None:
                if error is None:
                    gathering.acknowledged(AckedDocument(len(leases) - len(expired), expired))
                else:
                    gathering.refuse(error)

            gathering.is_acking = True
            self._endings.end(LeaseEnd(Ending.ACK_SOON, subscription.id, leases), done)
        gathering.begin()
        return gathering.cancel
