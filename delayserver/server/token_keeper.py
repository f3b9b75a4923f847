"""The tokens of a process: read when it starts, and again when `delayserver token` changes them.

Cost: that of reading the file, in slices of a turn. Threads: belongs to the event loop.
"""

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.slices import Slices
from storage.errors import StorageError
from storage.files import Files

log = structlog.get_logger()


def open_tokens(settings: Settings, files: Files, directory: Path, now_ms: int) -> TokenTable:
    """The tokens in `directory`, which `files` open. Raises StorageError, and AccessError where
    others could call without a token."""
    tokens = TokenTable(TokenFile(files), settings.token, time.monotonic)
    tokens.refresh(now_ms)
    if not settings.on_loopback and not len(tokens):
        raise AccessError(
            f"{settings.host} is not a loopback address: make a token (delayserver token "
            f"create NAME --scope admin --data-dir {directory}), or set one "
            "(DELAYSERVER_TOKEN, at least 16 characters), before others can reach the server"
        )
    return tokens


class TokenKeeper:
    """Keeps a table as the file is."""

    def __init__(
        self,
        tokens: TokenTable,
        slices: Slices,
        clock: Callable[[], int],
        on_not_understood: Callable[[str, str, str], None],
    ) -> None:
        """`on_not_understood`: told of each token that is not, once: "token", its name and why."""
        self._tokens = tokens
        self._slices = slices
        self._clock = clock
        self._on_not_understood = on_not_understood
        self._is_refreshing = False
        self._error = ""
        self._told: set[tuple[str, str]] = set()
        """Tokens that are not understood, and why, as the log has them."""

    def refresh(self) -> None:
        """Take over the changes of `delayserver token`, soon."""
        if not self._is_refreshing:
            self._is_refreshing = True
            self._slices.begin(self._tokens.refreshing(self._clock()), self._on_refreshed)

    def _on_refreshed(self, nothing: None, error: Exception | None) -> None:
        self._is_refreshing = False
        if error is not None and not isinstance(error, StorageError):
            raise error
        if error is not None and str(error) != self._error:
            log.error("the tokens stay as they were", error=str(error))
        self._error = "" if error is None else str(error)
        not_understood = set(self._tokens.not_understood.items())
        for name, reason in not_understood - self._told:
            self._on_not_understood("token", name, reason)
        self._told = not_understood
