"""The supervisor: what it does is tested with processes (tests/integration/test_supervisor.py)."""

from __future__ import annotations

import subprocess
import sys


def test_it_imports_nothing_of_a_server() -> None:
    """It serves nobody: one line at the head of a module would bring it all, and its memory."""
    program = "import sys, delayserver.serve.supervisor; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    imported = set(found.stdout.split())
    assert "delayserver.serve.supervisor" in imported
    assert imported.isdisjoint(
        {
            *("delayserver.serve.process", "delayserver.server", "delayserver.decisions"),
            *("fastapi", "prometheus_client", "storage.replicated.log", "uvicorn"),
        }
    )
