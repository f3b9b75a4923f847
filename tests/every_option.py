"""Messages that wait in all the ways there are, in a server whose processes are killed meanwhile.

    schedules   each planned time is run once, whoever is killed between two of them
    groups      their messages come in due order, one by one
    to          those that nobody takes die, and that is told (`on_dead`), as is what arrives
    replays     what was settled before comes once more

What is under way at a kill comes again, with the same id, and nothing else does. Whoever runs it
kills; this publishes, and says in the end what is wrong.

Cost: some 100 messages within 5 s. Threads: belongs to one; the receiver has its own.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from tests.integration.api_support import Received, Receiver, now_ms, time_ms, unique
from tests.waiting import wait_until

SCHEDULES, RUNS, EVERY_MS = 4, 5, 1000
GROUPS, MEMBERS, STEP_MS = 4, 12, 200
DIRECT = 8
"""Of each kind; enough of each for every shard to have some."""
RETRY = {"max_attempts": 50, "backoff": ["200ms"]}
PATIENCE_S = 60.0


class Ask(Protocol):
    """One call; its answer."""

    def __call__(self, method: str, path: str, document: Any = None, /) -> Any: ...


class EveryOption:
    """All of it, published at once, and due from then on for some seconds."""

    def __init__(self, ask: Ask, receiver: Receiver) -> None:
        self._receiver = receiver
        self._name = unique("every")
        self._hooks = {name: receiver.hook() for name in ("run", "turn", "told", "direct", "again")}
        self._failing = receiver.hook(500)
        for name in ("run", "turn", "told", "again"):
            self._subscribe(ask, name)
        self._settled = self._messages(ask, [{"subject": f"{self._name}.again"}] * DIRECT)
        wait_until(lambda: len(self._ids("again")) == DIRECT)
        wait_until(lambda: states(ask, self._settled) == {"delivered"})
        self._start_ms = now_ms() + EVERY_MS
        for number in range(SCHEDULES):
            self._schedule(ask, f"{self._name}-{number}")
        self._grouped = self._messages(ask, [*self._members()])
        self._told = {
            "dead": self._messages(ask, self._direct(self._failing, "on_dead")),
            "delivered": self._messages(ask, self._direct(self._hooks["direct"], "on_delivered")),
        }
        for message_id in self._settled:
            ask("POST", f"/v1/messages/{message_id}/replay")

    def _subscribe(self, ask: Ask, name: str) -> None:
        document = {
            "subject": f"{self._name}.{name}",
            "type": "webhook",
            "url": self._hooks[name],
            "retry": RETRY,
        }
        ask("PUT", f"/v1/subscriptions/{self._name}-{name}", document)

    def _schedule(self, ask: Ask, name: str) -> None:
        document = {
            "subject": f"{self._name}.run",
            "every": EVERY_MS,
            "start_at": self._start_ms,
            "max_runs": RUNS,
            "catch_up": "all",
        }
        ask("PUT", f"/v1/schedules/{name}", document)

    def _messages(self, ask: Ask, messages: list[dict[str, Any]]) -> list[str]:
        ids: list[str] = ask("POST", "/v1/messages/batch", messages)["ids"]
        return ids

    def _members(self) -> Iterable[dict[str, Any]]:
        for number in range(MEMBERS):
            for group in range(GROUPS):
                yield {
                    "subject": f"{self._name}.turn",
                    "group": f"{self._name}-{group}",
                    "body": {"group": group, "number": number},
                    "deliver_at": self._start_ms + STEP_MS * number,
                }

    def _direct(self, url: str, outcome: str) -> list[dict[str, Any]]:
        return [
            {
                "subject": f"{self._name}.direct",
                "key": f"{outcome}-{number}",
                "to": {"url": url, "retry": {"max_attempts": 2, "backoff": ["500ms"]}},
                outcome: {"subject": f"{self._name}.told"},
                "deliver_at": self._start_ms + 2 * STEP_MS * number,
            }
            for number in range(DIRECT)
        ]

    # ── what has come ──────────────────────────────────────────────────────────────────────────

    def _all(self, name: str) -> list[Received]:
        return self._receiver.all(self._hooks[name])

    def _ids(self, name: str) -> set[str]:
        return {one.headers["webhook-id"] for one in self._all(name)}

    def until_members(self, count: int) -> None:
        """Wait until so many messages of groups have come, of GROUPS × MEMBERS."""
        wait_until(lambda: len(self._ids("turn")) >= count, PATIENCE_S)

    def check(self, ask: Ask, kills: int) -> None:
        """Wait for all of it, and say what is wrong."""
        self.until_members(GROUPS * MEMBERS)
        wait_until(lambda: len(self._ids("run")) >= SCHEDULES * RUNS, PATIENCE_S)
        wait_until(lambda: len(self._ids("told")) >= 2 * DIRECT, PATIENCE_S)
        wait_until(lambda: len(self._replayed()) >= DIRECT, PATIENCE_S)
        arrived = [*self._grouped, *self._settled, *self._told["delivered"]]
        wait_until(lambda: states(ask, arrived) == {"delivered"}, PATIENCE_S)
        wait_until(lambda: states(ask, self._told["dead"]) == {"dead"}, PATIENCE_S)
        self._check_runs()
        self._check_groups(kills)
        self._check_outcomes()
        assert self._replayed() == set(self._settled)
        for name in self._hooks:
            times = Counter(
                (one.headers["webhook-id"], one.headers.get("delay-replay"))
                for one in self._all(name)
            )
            assert max(times.values()) <= 1 + kills, (name, times)

    def _check_runs(self) -> None:
        """Each planned time of each schedule has one message, and there are no others."""
        planned = defaultdict(set)
        for one in self._all("run"):
            run = one.headers["delay-schedule"], time_ms(one.headers["delay-planned"])
            planned[run].add(one.headers["webhook-id"])
        assert planned.keys() == {
            (f"{self._name}-{number}", self._start_ms + EVERY_MS * run)
            for number in range(SCHEDULES)
            for run in range(RUNS)
        }
        assert {len(ids) for ids in planned.values()} == {1}, planned

    def _check_groups(self, kills: int) -> None:
        """One after the other; what comes again was not settled at a kill, and is in order, too."""
        numbers = defaultdict(list)
        for one in self._all("turn"):
            body = json.loads(one.body)
            numbers[body["group"]].append(body["number"])
        for came in numbers.values():
            steps = [after - before for before, after in itertools.pairwise(came)]
            assert max(steps) == 1 and sum(step != 1 for step in steps) <= kills, came
            assert sorted(set(came)) == [*range(MEMBERS)]

    def _check_outcomes(self) -> None:
        """Each is told by one message."""
        told = {one.headers["webhook-id"]: json.loads(one.body) for one in self._all("told")}
        assert Counter((one["outcome"], one["id"]) for one in told.values()) == Counter(
            (outcome, message_id) for outcome, ids in self._told.items() for message_id in ids
        )

    def _replayed(self) -> set[str]:
        return {
            one.headers["webhook-id"]
            for one in self._all("again")
            if one.headers.get("delay-replay") == "1"
        }


def states(ask: Ask, ids: Iterable[str]) -> set[str]:
    """What a server says of messages."""
    return {ask("GET", f"/v1/messages/{message_id}")["state"] for message_id in ids}
