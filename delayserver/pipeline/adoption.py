"""The server's side of a bulk load, over HTTP: begin, adopt, watch.

Every call may be repeated: an import has a name, and is adopted once. So a server that is restarted
meanwhile is waited for, and asked again.

Cost: a few requests. Threads: the caller's.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from delayserver.errors import PipelineError
from delayserver.times import parse_time_ms
from storage.staging import manifest_path

SUBJECTS_PER_CALL = 10_000
DUPLICATES_PER_CALL = 10_000
POLL_S = 0.2
CALL_TIMEOUT_S = 30.0
ADOPT_TIMEOUT_S = 600.0
_WAIT_FOR = (502, 503, 504)


class RefusedError(PipelineError):
    """The server understood, and said no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Begun:
    """What the server said at the beginning."""

    state: str
    subjects: dict[str, int]
    now_ms: int
    delay_max_ms: int
    body_max_bytes: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of an import."""

    state: str
    count: int
    done: int
    accepted: int
    duplicates: int
    conflicts: int
    first_seq: int


class Adoption:
    """A server, and one import."""

    def __init__(
        self,
        url: str,
        import_id: str,
        *,
        token: str | None = None,
        wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait_s`: how long to wait for a server that does not answer, or is not ready."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False
        )
        self._url = url
        self._id = import_id
        self._wait_s = wait_s
        self._sleep = sleep
        self._monotonic = monotonic

    def __enter__(self) -> "Adoption":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def begin(self, subjects: list[str]) -> Begun:
        """Register the subjects. Raises RefusedError, PipelineError."""
        numbers: dict[str, int] = {}
        for start in range(0, len(subjects), SUBJECTS_PER_CALL):
            some = subjects[start : start + SUBJECTS_PER_CALL]
            answer = self._call("PUT", f"/v1/imports/{self._id}", {"subjects": some})
            numbers |= answer["subjects"]
        return Begun(
            answer["state"],
            numbers,
            parse_time_ms(answer["now"]),
            answer["delay_max_ms"],
            answer["body_max_bytes"],
        )

    def find(self) -> Adopted | None:
        """How far the import is; None if the server has not begun to adopt it."""
        try:
            answer = self._call("GET", f"/v1/imports/{self._id}")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise
        return _adopted(answer)

    def adopt(self) -> Adopted:
        """Have it adopted; on return that is durable. Raises RefusedError, PipelineError."""
        document = {"manifest": manifest_path(self._id)}
        return _adopted(self._call("POST", "/v1/imports", document, timeout_s=ADOPT_TIMEOUT_S))

    def follow(self, progress: Callable[[int, int], None]) -> Adopted:
        """Wait until everything is filed; `progress` is told rows done, of how many."""
        while True:
            found = self.find()
            if found is None:
                raise PipelineError(f"the server at {self._url} does not know import {self._id}")
            progress(found.done, found.count)
            if found.state == "adopted":
                return found
            self._sleep(POLL_S)

    def duplicates(self) -> Iterator[tuple[int, str]]:
        """Rows that were left out, and the ids of the messages that hold their keys."""
        cursor: str | None = "0"
        while cursor is not None:
            query = f"limit={DUPLICATES_PER_CALL}&cursor={cursor}"
            answer = self._call("GET", f"/v1/imports/{self._id}/duplicates?{query}")
            for duplicate in answer["duplicates"]:
                yield duplicate["row"], duplicate["id"]
            cursor = answer["cursor"]

    def _call(
        self, method: str, path: str, document: object = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        deadline = self._monotonic() + self._wait_s
        while True:
            try:
                response = self._client.request(method, path, json=document, timeout=timeout_s)
            except httpx.TransportError as error:
                if self._monotonic() >= deadline:
                    raise PipelineError(
                        f"no server can be reached at {self._url} ({error}); start it, or say "
                        "where it is with --server"
                    ) from error
            else:
                if response.status_code not in _WAIT_FOR or self._monotonic() >= deadline:
                    return self._answer(response)
            self._sleep(POLL_S)

    def _answer(self, response: httpx.Response) -> Any:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and "title" in answer:
            text = f"the server refused: {answer['title']}: {answer.get('detail', '')}"
            raise RefusedError(response.status_code, text)
        raise PipelineError(
            f"what answers at {self._url} is not a delay server (status {response.status_code})"
        )


def _adopted(answer: dict[str, Any]) -> Adopted:
    return Adopted(**{name: answer[name] for name in Adopted.__slots__})
