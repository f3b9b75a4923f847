"""The server's side of a bulk load, over HTTP: begin, adopt, watch.

Every call may be repeated: an import has a name, and is adopted once. If there are several shards,
each adopts its own staged messages. The shard that gets the call hands it on.

Cost: a few requests. Threads: the caller's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from delayserver.errors import PipelineError
from delayserver.pipeline.calls import CallRefusedError, ServerCalls
from delayserver.times import parse_time_ms
from storage.shards import shard_directory
from storage.staging import manifest_path

SUBJECTS_PER_CALL = 10_000
DUPLICATES_PER_CALL = 10_000
ADOPT_TIMEOUT_S = 600.0
FOLLOW_S = 0.05
"""The time between two questions about the progress of filing."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The server's answer at the beginning."""

    state: str
    subjects: dict[str, int]
    now_ms: int
    delay_max_ms: int
    body_max_bytes: int
    directory: str
    """The fingerprint of its data directory."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The state of an import."""

    state: str
    count: int
    done: int
    accepted: int
    duplicates: int
    conflicts: int
    first_seq: int


class Adoption(ServerCalls):
    """A server, or one shard of it, and one import."""

    def __init__(self, url: str, import_id: str, *, shard: int | None = None, **rest: Any) -> None:
        """`shard`: its number, if there are several. `rest`: as ServerCalls has it."""
        super().__init__(url, **rest)
        self.import_id = import_id
        self._query = "" if shard is None else f"?shard={shard}"
        below = "" if shard is None else f"{shard_directory(shard)}/"
        self._manifest = f"{below}{manifest_path(import_id)}"

    def begin(self, subjects: list[str]) -> Begun:
        """Register the subjects; without any, only ask. Raises CallRefusedError, PipelineError."""
        numbers: dict[str, int] = {}
        for start in range(0, max(1, len(subjects)), SUBJECTS_PER_CALL):
            some = subjects[start : start + SUBJECTS_PER_CALL]
            path = f"/v1/imports/{self.import_id}{self._query}"
            answer = self.call("PUT", path, {"subjects": some})
            numbers |= answer["subjects"]
        return Begun(
            answer["state"],
            numbers,
            parse_time_ms(answer["now"]),
            answer["delay_max_ms"],
            answer["body_max_bytes"],
            answer["directory"],
        )

    def find(self) -> Adopted | None:
        """How far the import is; None if the server has not begun to adopt it."""
        try:
            answer = self.call("GET", f"/v1/imports/{self.import_id}{self._query}")
        except CallRefusedError as error:
            if error.status == 404:
                return None
            raise
        return _adopted(answer)

    def adopt(self) -> Adopted:
        """Have it adopted; durable on return. Raises CallRefusedError, PipelineError."""
        document, path = {"manifest": self._manifest}, f"/v1/imports{self._query}"
        return _adopted(self.call("POST", path, document, timeout_s=ADOPT_TIMEOUT_S))

    def follow(self, progress: Callable[[int, int], None]) -> Adopted:
        """Wait until everything is filed; `progress` gets the rows done, and all rows."""
        while True:
            found = self.find()
            if found is None:
                raise PipelineError(
                    f"the server at {self.url} does not know import {self.import_id}"
                )
            progress(found.done, found.count)
            if found.state == "adopted":
                return found
            self._sleep(FOLLOW_S)

    def duplicates(self) -> Iterator[tuple[int, str]]:
        """Rows that were left out, and the ids of the messages that hold their keys."""
        cursor: str | None = "0"
        while cursor is not None:
            path = f"/v1/imports/{self.import_id}/duplicates{self._query or '?'}"
            query = f"&limit={DUPLICATES_PER_CALL}&cursor={cursor}"
            answer = self.call("GET", f"{path}{query}")
            for duplicate in answer["duplicates"]:
                yield duplicate["row"], duplicate["id"]
            cursor = answer["cursor"]


def _adopted(answer: dict[str, Any]) -> Adopted:
    return Adopted(**{name: answer[name] for name in Adopted.__slots__})
