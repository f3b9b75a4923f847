"""`scripts/soak`: one real server for a long time; clients misbehave, its clock and files change.

Threads: one.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.harness.notes import Notes
from tests.harness.run import Run
from tests.harness.script import run_script, script_parser
from tests.soak.traffic import SoakTraffic
from tests.soak.weather import SAMPLE_S, WEATHER, Weather, WeatherServer, pause_of, schedule


def soak(
    directory: Path,
    seed: int,
    *,
    seconds: float,
    weather: Sequence[Weather] = WEATHER,
    bug: str | None = None,
) -> Run:
    """A server under TLS has everything at once. `bug`: an option of `tests.soak.child` that plants
    one."""
    sample_s = min(SAMPLE_S, seconds / 40)
    server = WeatherServer(Notes(directory), seed, sample_s=sample_s, bug=bug)
    traffic = SoakTraffic(server, seed + 1, pause_s=pause_of(seconds))
    changes = schedule(weather, seconds)
    return Run("soak", seed, server, changes, traffic, 0, seconds, grace_s=15, quiet_s=2)


def main() -> None:
    """The script."""
    about = "One server for a long time, with everything at once."
    parser = script_parser("soak", about, minutes=30)
    run_script(
        parser,
        lambda directory, seed, found: soak(directory, seed, seconds=60 * found.minutes),
    )


if __name__ == "__main__":
    main()
