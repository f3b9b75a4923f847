"""Looks for the world that notices a deliberate bug: where it was caught last comes first.

Which worlds notice a bug changes with every file call of the code, and some bugs are noticed in one
world of a hundred. To look through all before it costs minutes in each run of the tests, so
`caught.json` has the seed, by the name of the canary. A seed that is out of date costs time and
nothing else, since all other worlds come behind it. This looks through them in order, and writes
down where each is caught:

    CANARY_SEEDS=write pytest tests/simulation -k test_the_simulation_finds
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

SEEDS = Path(__file__).with_name("caught.json")
MUST_WRITE = os.environ.get("CANARY_SEEDS") == "write"


def caught_seeds(names: Iterable[str]) -> set[int]:
    """The worlds that caught these last."""
    known = json.loads(SEEDS.read_bytes())
    return {known[name] for name in names if name in known}


def first_catch(
    name: str,
    seeds: Iterable[int],
    run: Callable[[int], object],
    caught_by: tuple[type[Exception], ...],
) -> str | None:
    """By what the first world of these ended that ended by one of `caught_by`: `seed 7: Violation:
    …`. None: no world did. Any other error is none of the canary's, and an AssertionError here."""
    seeds = list(seeds)
    last: int | None = json.loads(SEEDS.read_bytes()).get(name)
    if last in seeds and not MUST_WRITE:
        seeds.remove(last)
        seeds.insert(0, last)
    for seed in seeds:
        try:
            run(seed)
        except caught_by as error:
            if MUST_WRITE:
                _write(name, seed)
            return f"seed {seed}: {type(error).__name__}: {error}"
        except Exception as error:
            names = " or ".join(one.__name__ for one in caught_by)
            raise AssertionError(
                f"seed {seed} ended by a {type(error).__name__} ({error}), not by a {names}: "
                "the canary may have died of itself"
            ) from error
    return None


def _write(name: str, seed: int) -> None:
    """Other processes may write others."""
    with SEEDS.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        text = json.dumps({**json.load(file), name: seed}, indent=1, sort_keys=True)
        file.seek(0)
        file.truncate()
        file.write(f"{text}\n")
