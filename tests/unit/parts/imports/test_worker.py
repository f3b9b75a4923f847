"""The thread of the importer tells the result of each import, or the error, to the event loop."""

from typing import Any

import pytest

from delayserver.errors import NotFoundError
from delayserver.parts.imports.importer import VerifyRequest
from delayserver.parts.imports.worker import ImporterThread
from storage.errors import DiskError, StagingError
from tests.unit.parts.imports.machine import LATER, Machine


def _request(import_id: str) -> VerifyRequest:
    return VerifyRequest(import_id, lambda rows, count: None)


def test_each_request_is_answered_with_its_result_or_its_error(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.stage("b", *LATER)
    machine.disk.unlink("imports/b.0.part")
    thread = machine.server.worker(ImporterThread)
    posted: list[tuple[Any, ...]] = []
    thread._post = lambda function, *arguments: posted.append(arguments)
    waiting = [_request("a"), _request("b"), _request("c")]
    thread.handle(waiting)
    assert waiting == []
    (verified, none), (nothing, damaged), (_, missing) = posted
    assert (verified.manifest.count, none, nothing) == (len(LATER), None, None)
    assert isinstance(damaged, StagingError) and isinstance(missing, NotFoundError)


def test_an_error_of_the_disk_ends_the_thread(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = machine.server.worker(ImporterThread)

    def fail(request: VerifyRequest) -> None:
        raise DiskError("open", "imports/a", "I/O error")

    monkeypatch.setattr(thread._importer, "verify", fail)
    with pytest.raises(DiskError):
        thread.handle([_request("a")])
