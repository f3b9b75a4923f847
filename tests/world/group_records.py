"""What groups promise, held against what leaves (`group`).

    one         of a group, a subscription has one message under way: from when it leaves until it
                is settled there. A retry that is recorded holds its place over a crash, too
    in order    of what fell due together, or before, the one that was due first leaves first
    nobody      waits behind nobody: what waits has another of its group before it

Only durable records, what fell due and what left are looked at, never whose turn the server thinks
it is.

Cost: some µs for a message with a group, nothing for others. Threads: none.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.world.violation import Violation


class GroupOfOne(NamedTuple):
    """A group, as one subscription has it."""

    subscription_id: int
    group: str


class GroupTurn(NamedTuple):
    """By which rows of a group take their turns: when the first attempt was due, or somebody asked
    for another, then by the seq of the message."""

    order_ms: int
    message_seq: int


class _Fired(NamedTuple):
    """When a row fell due."""

    row: int
    number: int
    """Of the times that rows did in this life."""
    durable_seq: int


class GroupRecords:
    """Which messages have a group, and which of them are under way."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.waits_still: Callable[[int, int], bool] = lambda row, subscription_id: True
        """Whether a row is to be delivered to a subscription still, as far as is known outside."""
        self.is_named: Callable[[int], bool] = lambda row: False
        """Whether a row was named in this life, since it cannot be read."""
        self._groups: dict[int, str] = {}
        """By message."""
        self._turns: dict[int, GroupTurn] = {}
        """By schedule row."""
        self._retries: dict[GroupOfOne, dict[int, int]] = {}
        """Retries that are recorded: the row of the last one, by message."""
        self._shaken: set[GroupOfOne] = set()
        """Where a retry could not be read, and others went on: there are two then, perhaps."""
        self.new_life()

    def new_life(self) -> None:
        """What has left and is not recorded is forgotten; what is recorded is not."""
        self._out: dict[GroupOfOne, tuple[int, int]] = {}
        """Which message has left, and is not settled; and its row."""
        self._left: dict[GroupOfOne, dict[GroupTurn, _Fired]] = {}
        """What has left as its turn came, and when it had fallen due."""
        self._fired: dict[int, _Fired] = {}
        self._fires = 0

    # ── what is durable ────────────────────────────────────────────────────────────────────────

    def published(self, message_seq: int, group: str) -> None:
        """A message with a group is durable."""
        self._groups[message_seq] = group
        self._counts["messages with a group"] += 1

    def waits(
        self, row: int, message_seq: int, due_ms: int, retry_of: int, place_of: int, attempt: int
    ) -> None:
        """A row of a message is durable. `retry_of`: the row that it follows, if it is a retry of
        the same delivery, for the subscription `place_of`."""
        group = self._groups.get(message_seq)
        if group is None:
            return
        if not retry_of:
            self._turns[row] = GroupTurn(due_ms, message_seq)
            return
        self._turns[row] = self._turns[retry_of]
        if attempt > 1:
            self._retries.setdefault(GroupOfOne(place_of, group), {})[message_seq] = row

    def settled(self, message_seq: int, subscription_id: int | None = None) -> None:
        """A message is not under way any more; None: for nobody."""
        group = self._groups.get(message_seq)
        if group is None:
            return
        for place, (out, _) in list(self._out.items()):
            if out == message_seq and subscription_id in (None, place.subscription_id):
                del self._out[place]

    # ── what happens ───────────────────────────────────────────────────────────────────────────

    def fired(self, rows: Iterable[int], durable_seq: int) -> None:
        """Rows fell due together."""
        self._fires += 1
        for row in rows:
            if row in self._turns:
                self._fired[row] = _Fired(row, self._fires, durable_seq)

    def sent(
        self,
        row: int,
        subscription_id: int,
        *,
        since_seq: int | None,
    ) -> None:
        """A row leaves for a subscription. `since_seq`: the record that made the subscription, None
        where the row came to it from another one, or fell due before it was.

        Raises Violation."""
        turn = self._turns.get(row)
        if turn is None:
            return
        message_seq = turn.message_seq
        place = GroupOfOne(subscription_id, self._groups[message_seq])
        self._counts["sent of a group"] += 1
        held = self._held(place)
        if any(map(self.is_named, held.values())):
            self._shaken.add(place)
        elif not held:
            self._shaken.discard(place)
        if held and message_seq not in held and place not in self._shaken:
            raise Violation(
                f"message {message_seq} was sent to {place}, which waits for a retry of {[*held]}"
            )
        out, out_row = self._out.get(place, (message_seq, row))
        is_under_way = self.waits_still(out_row, subscription_id) and not self.is_named(out_row)
        if out != message_seq and is_under_way:
            raise Violation(f"message {message_seq} was sent to {place}, and {out} is under way")
        self._out[place] = message_seq, row
        left, fired = self._left.setdefault(place, {}), self._fired.get(row)
        # One that has not fired in this life was leased over a planned stop, and comes back.
        if fired is None or held or turn in left:
            self._counts["sent of a group again"] += 1
            return
        is_known = since_seq is not None and since_seq <= fired.durable_seq
        for other, other_fired in left.items() if is_known else ():
            if fired.number > other_fired.number or turn > other:
                continue
            # Of what is due at the same moment rows that are moved come behind, if they are many.
            if turn.order_ms < other.order_ms or row < other_fired.row:
                raise Violation(f"{turn} was sent to {place} after {other}, and was due before")
        left[turn] = fired

    def _held(self, place: GroupOfOne) -> dict[int, int]:
        """Retries that are recorded and wait: their rows, by message."""
        retries = self._retries.get(place, {})
        return {
            one: at for one, at in retries.items() if self.waits_still(at, place.subscription_id)
        }

    # ── what waits ─────────────────────────────────────────────────────────────────────────────

    def behind_nobody(
        self,
        subscription_id: int,
        waiting: Iterable[int],
        others: Iterable[int],
    ) -> set[str]:
        """Groups of rows that wait for their turn, and none of which has it. `others`: rows of the
        subscription that may leave, or have left; nothing else is under way."""
        groups = {self._groups[self._turns[row].message_seq] for row in waiting}
        groups -= {
            self._groups[self._turns[row].message_seq] for row in others if row in self._turns
        }
        self._counts["groups that wait"] += len(groups)
        blocked = set[str]()
        for group in groups:
            held = self._held(GroupOfOne(subscription_id, group))
            if all(map(self.is_named, held.values())):
                blocked.add(group)
        return blocked
