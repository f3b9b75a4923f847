"""The command `delayserver`, which is also `python -m delayserver`.

The client library is installed without the server's dependencies; the command says so then.

Cost: a millisecond, before the command line begins. Threads: one.
"""

import signal
import sys
from importlib.util import find_spec

NEEDED = ("typer", "numpy", "fastapi")
"""Packages of the extra `server`: with these, it is there."""


def main() -> None:
    """The entry point of the command."""
    if sys.argv[1:2] == ["serve"]:
        # A server takes SIGHUP when it can (delayserver.serve.hangups). Until then it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: only the client library is installed here, {missing[0]} is missing. "
            "For the server and this command: pip install 'delayserver[server]'"
        )
    from delayserver.cli import main as run

    run()


if __name__ == "__main__":
    main()
