"""The thread of imports that were staged: each is verified before it is adopted.

Cost: that of `Importer.verify`. Threads: it is one.
"""

from collections.abc import Callable

from delayserver.errors import DelayServerError
from delayserver.parts.imports.importer import Importer, Verified, VerifyRequest
from delayserver.server.threads import Fatal, Post, Worker
from storage.errors import ShortageError, StagingError


class ImporterThread(Worker[VerifyRequest]):
    """Verifies staged imports."""

    def __init__(
        self,
        importer: Importer,
        post: Post,
        on_verified: Callable[[Verified | None, Exception | None], None],
        fatal: Fatal,
    ) -> None:
        super().__init__("importer", fatal)
        self._importer = importer
        self._post = post
        self._on_verified = on_verified

    def handle(self, items: list[VerifyRequest]) -> None:
        while items:
            request = items.pop(0)
            verified, error = None, None
            try:
                verified = self._importer.verify(request)
            except (StagingError, DelayServerError, ShortageError) as caught:
                error = caught  # told to whoever asked
            self._post(self._on_verified, verified, error)
