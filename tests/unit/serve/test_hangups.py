"""A SIGHUP is taken by a thread, whenever it comes, and ends nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, subprocess, sys, threading
from delayserver.serve.hangups import Hangups, block

def me():
    os.kill(os.getpid(), signal.SIGHUP)

block()
me()  # before there is a thread that takes it
taken, looked = threading.Semaphore(0), threading.Semaphore(0)
calls = []

def on_hangup():
    calls.append(threading.current_thread().name)
    taken.release()
    if len(calls) == 1:
        raise ValueError("of no use")

Hangups(on_hangup, looked.release, look_s=0.01)
assert taken.acquire(timeout=20)
me()  # after a call that failed
assert taken.acquire(timeout=20)
assert looked.acquire(timeout=20)
# A process that is started now has it blocked from its first moment.
child = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
assert subprocess.check_output([sys.executable, "-S", "-c", child]) == b"True\\n"
assert calls == ["hangups"] * 2, calls
"""


def test_a_hangup_is_taken_at_any_time() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "what SIGHUP asks for was not done" in ended.stdout + ended.stderr
