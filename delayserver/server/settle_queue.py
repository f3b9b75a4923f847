"""Settled rows on their way to the settler: those of a turn of the event loop is one request.

Cost: an append for each call, and one request for each turn. Threads: belongs to the event loop.
"""

from collections.abc import Callable

from delayserver.server.threads import SettleRequest
from storage.notes import NoteBytes


class SettleQueue:
    """The request of this turn."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], None],
        put: Callable[[SettleRequest], None],
    ) -> None:
        """`put`: gives the settler a request."""
        self._call_soon = call_soon
        self._put = put
        self._request = SettleRequest()
        self._is_asked = False
        """Whether the request goes to the settler at the end of this turn."""

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        """See `DispatcherPorts`."""
        items = self._request.rows_by_hour.setdefault(hour, [])
        items.append(rows)
        if note is not None:
            items.append(note)
        self._ask()

    def settle_recorded(self, hour: int, rows: bytes, offset: int) -> None:
        """See `DispatcherPorts`."""
        at_offset = self._request.recorded.setdefault(offset, {})
        at_offset.setdefault(hour, []).append(rows)
        self._ask()

    def when_settled(self, done: Callable[[], None]) -> None:
        """Call back once everything that was settled so far is durable."""
        self._request.done.append(done)
        self._ask()

    def retire(self, hours: list[int], recorded: Callable[[], None]) -> None:
        """Everything of these hours is settled; call back once that is durable."""
        self._request.settled_hours += hours
        self.when_settled(recorded)

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Give the settler all that there is."""
        self._is_asked = False
        request, self._request = self._request, SettleRequest()
        if request.rows_by_hour or request.recorded or request.done:
            self._put(request)
