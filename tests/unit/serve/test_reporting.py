"""The reports of a shard to its supervisor arrive whole and in order, and wait for nobody."""

from __future__ import annotations

import os
import sys

import pytest

from delayserver.serve import reporting
from delayserver.serve.reporting import READY, tell_line, tell_supervisor


class Output:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_supervisor_gets_lines_in_order_or_is_gone(
    monkeypatch: pytest.MonkeyPatch, *, is_gone: bool
) -> None:
    reader, descriptor = os.pipe()
    monkeypatch.setattr(sys, "stdout", Output(descriptor))
    reporting._supervisor.cache_clear()
    if is_gone:
        os.close(reader)
    try:
        tell_line(b'{"owner": 1}\n')
        tell_supervisor(READY)
        assert reporting._supervisor().drain(20)
        if not is_gone:
            assert os.read(reader, 1000) == b'{"owner": 1}\nready\n'
            os.close(reader)
    finally:
        reporting._supervisor.cache_clear()
        os.close(descriptor)
