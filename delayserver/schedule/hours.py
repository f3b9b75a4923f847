"""Which hours are loaded, how many of their deliveries are not settled, and when they are done.

Hours go live in order, up to `live_through_hour`; an hour that is live but still being loaded holds
the wheel back (`loaded_until_ms`). The count of an hour is the number of its rows that wait plus
the deliveries on their way; it exists for live hours only.

Cost: one dictionary access per change. Threads: belongs to the event loop.
"""

from dataclasses import dataclass, field

from storage.rows import HOUR_MS


@dataclass(slots=True)
class Hours:
    """The hours that the event loop knows of."""

    live_through_hour: int = -1
    loading: set[int] = field(default_factory=set)
    """Hours that were asked for and have not come."""
    _unsettled: dict[int, int] = field(default_factory=dict)
    _closed_at_seq: dict[int, int] = field(default_factory=dict)
    retired_through_hour: int = -1
    """The newest hour that was settled."""

    def is_live(self, hour: int) -> bool:
        """Whether new rows of the hour go to the wheel."""
        return hour <= self.live_through_hour

    def takes_express(self, hour: int) -> bool:
        """Whether rows of the hour may go to the wheel before they are filed.

        Not if it was settled (a clock that was set back does that): its files may be deleted at any
        moment, until a row that is filed opens it again."""
        is_open = hour > self.retired_through_hour or hour in self._unsettled
        return is_open and self.is_live(hour)

    @property
    def loaded_until_ms(self) -> int:
        """The wheel has everything that is due before this moment."""
        first = min(self.loading, default=self.live_through_hour + 1)
        return first * HOUR_MS

    def add(self, hour: int, count: int) -> None:
        """`count` more (or, negative, fewer) deliveries of the hour are unsettled."""
        known = self._unsettled.get(hour, 0) + count
        assert known >= 0, (hour, known)
        self._unsettled[hour] = known

    def unsettled_by_hour(self) -> dict[int, int]:
        """Deliveries that are not settled, of each live hour that was loaded."""
        known = self._unsettled.items()
        return {hour: count for hour, count in known if hour not in self.loading}

    def unsettled(self) -> int:
        """Deliveries of all live hours that are not settled."""
        return sum(self._unsettled.values())

    def oldest_open(self, now_ms: int) -> tuple[int, int] | None:
        """The oldest hour that is over and in which something is not settled, and how many
        deliveries that are; None: there is none."""
        return min(
            (
                (hour, count)
                for hour, count in self._unsettled.items()
                if count and (hour + 1) * HOUR_MS <= now_ms
            ),
            default=None,
        )

    def pop_settled(self, now_ms: int, next_seq: int, filed_seq: int) -> list[int]:
        """The hours that are over and done; each is reported once.

        An hour is done when its end has passed, every record that was accepted before its end has
        been filed (it may be due in this hour), and nothing of it is unsettled."""
        settled = []
        for hour, count in list(self._unsettled.items()):
            if (hour + 1) * HOUR_MS > now_ms or hour in self.loading:
                continue
            closed_at_seq = self._closed_at_seq.setdefault(hour, next_seq)
            if count == 0 and filed_seq >= closed_at_seq - 1:
                del self._unsettled[hour], self._closed_at_seq[hour]
                settled.append(hour)
                self.retired_through_hour = max(self.retired_through_hour, hour)
        return settled
