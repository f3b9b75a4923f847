"""Chooses the tests of a run: the default tier, and whole the tiers of the folders that changed.

    TIERS     each test file belongs to one tier. A tier names the tests of it that always run
    FOLDERS   each folder of the project names the tiers that run whole when a file in it changes

A change counts from the newest commit whose committer date lies 24 hours or more before that of
HEAD, so all that landed within a day is tested whole, whoever landed it. Files that are not
committed yet count, too. A clone without that history (shallow, or no repository) runs everything.

scripts/test calls this before there is an environment, so it needs Python alone:

    python tests/tiers.py [--all | --quick] [--since COMMIT]

prints three lines for scripts/test: which programs and jars are needed, which tiers are whole, and
which paths go to pytest. It tells on stderr which tiers it chose, and why.
"""

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DAY_S = 24 * 60 * 60


@dataclass(frozen=True)
class Tier:
    """Tests that run whole for the same reason.

    `files` are patterns below tests/; a file belongs to the first tier that has it. `always` names
    the tests of the default tier: files, or tests as pytest names them; None means all of them.
    `needs` are programs and jars as scripts/environment.sh names them, of the whole tier and of
    what always runs."""

    name: str
    files: tuple[str, ...]
    always: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    always_needs: tuple[str, ...] = ()
    is_sampled: bool = False
    """All of its tests always run, with a part of their cases: see `tests.depth`."""
    is_quick: bool = False
    """Runs with --quick, too."""


KAFKA = ("java", "kafka")
SPARK = ("java", "spark-kafka")
SPARKS = (*SPARK, "spark-classes")
"""Many of them: the first one keeps its classes for the others, which takes 40 s."""

TIERS = (
    Tier("unit", ("unit/**",), needs=("systemd",), is_quick=True),
    Tier("property", ("property/**",), is_quick=True),
    Tier("golden", ("golden/**",), is_quick=True),
    Tier("simulation", ("simulation/**",), is_sampled=True),
    Tier(
        "bench",
        ("integration/test_bench.py", "pipeline/test_bench.py", "cluster/test_bench.py"),
        always=(
            "integration/test_bench.py::test_every_benchmark_of_the_script_is_run_here",
            "integration/test_bench.py::test_purgatory",
        ),
        needs=("wrk", "redis", "nats", "chromium", *KAFKA, *SPARKS),
    ),
    Tier("celery", ("integration/test_celery*.py",), always=(), needs=("redis", "rabbitmq")),
    Tier(
        "shards",
        (
            "integration/test_client_shards.py",
            "integration/test_cluster_map.py",
            "integration/test_demo.py",
            "integration/test_sharded_server.py",
            "integration/test_shared_limits.py",
            "integration/test_standby.py",
            "integration/test_supervisor.py",
        ),
        always=("integration/test_client_shards.py", "integration/test_sharded_server.py"),
    ),
    Tier("http", ("integration/**",)),
    Tier(
        "console",
        ("console/**",),
        always=("console/test_console.py::test_every_view_is_for_everybody",),
        needs=("chromium",),
        always_needs=("chromium",),
    ),
    Tier(
        "sinks",
        ("sinks/**", "cluster/test_kafka_sink.py"),
        always=(
            "sinks/test_kafka.py::TestKafka::test_a_message_with_its_headers",
            "sinks/test_nats.py::TestNats::test_a_message_with_its_headers",
            "sinks/test_rabbitmq.py::TestRabbitMq::test_a_message_with_its_headers",
            "sinks/test_redis.py::TestRedis::test_a_message_with_its_headers",
        ),
        needs=("redis", "nats", "rabbitmq", *KAFKA),
        always_needs=("redis", "nats", "rabbitmq", *KAFKA),
    ),
    Tier(
        "brokers",
        (
            "cluster/test_commands.py",
            "cluster/test_kafka.py",
            "cluster/test_secured.py",
            "cluster/test_transactions.py",
        ),
        always=(),
        needs=KAFKA,
    ),
    Tier(
        "cluster",
        ("cluster/**",),
        always=("cluster/test_here.py::test_the_demo_while_its_owner_is_killed",),
        needs=(*KAFKA, "prometheus"),
        always_needs=KAFKA,
    ),
    Tier(
        "load",
        ("pipeline/load/**", "pipeline/publish/**"),
        always=(
            "pipeline/load/test_load.py::test_rows_become_messages",
            "pipeline/load/test_note.py",
            "pipeline/load/test_staging.py",
            "pipeline/publish/test_values.py",
        ),
        needs=SPARKS,
        always_needs=SPARK,
    ),
    Tier(
        "archive",
        ("pipeline/archive/**",),
        always=(
            "pipeline/archive/test_archive.py::test_every_message_is_there_with_what_became_of_it",
            "pipeline/archive/test_table.py",
        ),
        needs=(*SPARKS, "s3"),
        always_needs=SPARK,
    ),
    Tier(
        "audits",
        ("pipeline/audits/**", "pipeline/exports/**", "pipeline/states/**"),
        always=(
            "pipeline/audits/test_audit.py::test_on_spark_it_is_the_same",
            "pipeline/audits/test_here.py",
            "pipeline/states/test_settlement.py",
            "pipeline/states/test_snapshot.py",
        ),
        needs=(*SPARKS, "s3"),
        always_needs=SPARK,
    ),
    Tier(
        "reading",
        ("pipeline/logs/**", "pipeline/reports/**", "pipeline/test_all_options.py"),
        always=("pipeline/logs/test_logs.py", "pipeline/logs/test_selection.py"),
        needs=SPARKS,
        always_needs=SPARK,
    ),
    Tier(
        "topics",
        ("pipeline/topics/**",),
        always=("pipeline/topics/test_folding.py",),
        needs=(*SPARKS, *KAFKA),
        always_needs=SPARK,
    ),
    Tier("spark", ("pipeline/**",), always=(), needs=SPARKS),
    Tier(
        "crash",
        ("crash/**",),
        always=(
            "crash/test_brokers.py",
            "crash/test_crash.py::test_killed_again_and_again",
            "crash/test_shards.py",
        ),
    ),
    Tier("chaos", ("chaos/**",)),
    Tier("soak", ("soak/**",), always=("soak/test_ledger.py",)),
    Tier("observe", ("observe/**",), always=("observe/test_dashboards.py",), needs=("prometheus",)),
)

_PIPELINE = ("load", "archive", "audits", "reading", "topics", "spark")
_ALL = tuple(tier.name for tier in TIERS)

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "storage": ("simulation", "audits"),
    "storage/replicated": ("brokers", "cluster"),
    "storage/testing": ("simulation",),
    "delayserver": ("simulation", "shards"),
    "delayserver/api": ("shards", "celery"),
    "delayserver/api/cluster": ("cluster", "shards"),
    "delayserver/api/hot": ("shards", "crash"),
    "delayserver/api/rest": ("shards", "console"),
    "delayserver/cli": ("shards",),
    "delayserver/cli/cluster": ("brokers", "cluster"),
    "delayserver/cli/demo": ("shards", "crash", "soak"),
    "delayserver/client": ("shards", "celery", "load"),
    "delayserver/console": ("console",),
    "delayserver/decisions": ("simulation",),
    "delayserver/delivery": ("simulation", "sinks"),
    "delayserver/examples": (),
    "delayserver/http": ("load", "celery"),
    "delayserver/integrations": ("celery",),
    "delayserver/integrations/celery": ("celery",),
    "delayserver/pipeline": ("spark",),
    "delayserver/pipeline/archive": ("archive",),
    "delayserver/pipeline/audits": ("audits", "topics"),
    "delayserver/pipeline/exports": ("audits",),
    "delayserver/pipeline/load": ("load",),
    "delayserver/pipeline/logs": ("reading", "audits"),
    "delayserver/pipeline/publish": ("load",),
    "delayserver/pipeline/reports": ("reading", "audits"),
    "delayserver/pipeline/states": ("audits", "reading"),
    "delayserver/pipeline/topics": ("topics",),
    "delayserver/queries": ("shards",),
    "delayserver/records": ("simulation", "audits"),
    "delayserver/recovery": ("simulation", "crash"),
    "delayserver/schedule": ("simulation",),
    "delayserver/security": ("shards",),
    "delayserver/server": ("simulation", "observe"),
    "delayserver/testing": ("simulation",),
    "delayserver/testing/replicas": ("simulation",),
    "delayserver/testing/shards": ("simulation",),
    "delayserver/testing/tampering": ("simulation",),
    "delayserver/timers": (),
    "deploy": ("observe",),
    "scripts": (),
    "scripts/bench": ("bench",),
    "scripts/benchmarks": ("bench",),
    "scripts/cluster": ("cluster",),
    "scripts/constraints.txt": _ALL,
    "scripts/crash": ("crash",),
    "scripts/kafka": ("brokers", "cluster"),
    "scripts/kafka.pom.xml": ("brokers", "cluster", "sinks", "topics"),
    "scripts/spark-kafka.pom.xml": ("topics",),
    # Tests belong to the tier of their folder; these are what tests of other folders share.
    "tests": (),
    "tests/cluster/brokers.py": ("brokers", "cluster", "sinks", "topics"),
    "tests/engine_contract.py": ("brokers",),
    "tests/every_option.py": ("cluster", "shards"),
    "tests/load.py": ("crash", "chaos", "soak"),
    "tests/long_run.py": ("crash", "chaos", "soak"),
    "tests/peers.py": ("crash",),
}
"""The tiers that run whole when a file below the folder changes; the longest name that fits counts.
A tier that always runs whole is not named: a change of `timers` is seen by its unit tests."""


@dataclass(frozen=True)
class Choice:
    """The tests of one run."""

    whole: frozenset[str]
    """Names of the tiers that run whole."""
    paths: tuple[str, ...]
    """For pytest."""
    needs: tuple[str, ...]
    reasons: tuple[str, ...]
    """Lines that say which tiers were chosen, and why."""


@cache
def tier_of(file: str) -> Tier:
    """The tier of a test file, whose path begins with tests/."""
    path = PurePosixPath(file).relative_to("tests")
    for tier in TIERS:
        if any(_matches(path, pattern) for pattern in tier.files):
            return tier
    raise LookupError(f"{file} belongs to no tier: see TIERS in tests/tiers.py")


def _matches(path: PurePosixPath, pattern: str) -> bool:
    folder = pattern.removesuffix("/**")
    return path.is_relative_to(folder) if folder != pattern else path.match(pattern)


def files_of(tier: Tier) -> list[str]:
    """The test files of a tier, as paths from the root of the project."""
    found = (path.relative_to(ROOT).as_posix() for path in sorted(TESTS.rglob("test_*.py")))
    return [file for file in found if tier_of(file) is tier]


def tiers_for(changed: str) -> tuple[str, ...]:
    """Names of the tiers that run whole when this file changes."""
    path = PurePosixPath(changed)
    fitting = [name for name in FOLDERS if path.is_relative_to(name)]
    longest = max(fitting, key=len, default="")
    if longest == "tests" and len(path.parts) > 2:
        return (tier_of(changed).name,)
    return FOLDERS.get(longest, ())


def choose(whole: Mapping[str, str], *, is_quick: bool = False) -> Choice:
    """The tests of a run in which these tiers are whole; the value is the reason."""
    paths: list[str] = []
    needs: list[str] = []
    for tier in TIERS:
        if is_quick and not tier.is_quick:
            continue
        if tier.name in whole or tier.always is None:
            paths += files_of(tier)
            needs += tier.needs
        else:
            paths += [f"tests/{name}" for name in tier.always]
            needs += tier.always_needs
    lines = [f"whole: {tier.name} ({whole[tier.name]})" for tier in TIERS if tier.name in whole]
    return Choice(frozenset(whole), tuple(paths), tuple(dict.fromkeys(needs)), tuple(lines))


def of_pytest(arguments: Iterable[str]) -> Choice:
    """What tests need that are named as pytest takes them; all, where none of them is a path."""
    named = [Path(one.partition("::")[0]) for one in arguments if not one.startswith("-")]
    paths = [(ROOT / one).resolve() for one in named if (ROOT / one).exists()]
    needs = [
        need
        for tier in TIERS
        for need in tier.needs
        if not paths
        or any((ROOT / file).is_relative_to(path) for file in files_of(tier) for path in paths)
    ]
    everything = frozenset(tier.name for tier in TIERS)
    return Choice(everything, (), tuple(dict.fromkeys(needs)), ())


# ── what has changed ──────────────────────────────────────────────────────────────────────────


class NoHistory(Exception):
    """The commits of the last day cannot be looked at; the text says why."""


def base_of(since: str | None) -> str:
    """The commit that a change is compared with. Raises NoHistory."""
    if since is not None:
        return _git("rev-parse", "--verify", f"{since}^{{commit}}")
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise NoHistory("the clone is shallow")
    head_s = int(_git("show", "--no-patch", "--format=%ct", "HEAD"))
    # `--before` stops at the first commit that is too new on some line of a merge: look at all.
    dated = (line.split() for line in _git("log", "--format=%ct %H").splitlines())
    old = [(int(at_s), commit) for at_s, commit in dated if int(at_s) <= head_s - DAY_S]
    if not old:
        raise NoHistory("no commit is a day older than HEAD")
    return max(old)[1]


def changed_since(commit: str) -> list[str]:
    """Paths of the files that differ from a commit, and of those that git does not know yet."""
    known = _git("diff", "--name-only", "--no-renames", commit)
    return [*known.splitlines(), *_git("ls-files", "--others", "--exclude-standard").splitlines()]


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise NoHistory("git is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NoHistory(f"git {words[0]}: {error.stderr.strip()}") from error
    return done.stdout.strip()


def whole_after(changed: Iterable[str]) -> dict[str, str]:
    """The tiers that run whole after a change of these files, with the reason."""
    folders: dict[str, dict[str, None]] = defaultdict(dict)
    for file in changed:
        for tier in tiers_for(file):
            folders[tier][str(PurePosixPath(file).parent)] = None
    return {tier: f"changed: {', '.join(list(names)[:4])}" for tier, names in folders.items()}


def main(arguments: list[str]) -> None:
    """Print the choice: for scripts/test on stdout, for people on stderr."""
    parser = argparse.ArgumentParser(prog="scripts/test")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest: no tier is chosen")
    options = parser.parse_args(arguments)
    everything = {tier.name: "--all" for tier in TIERS}
    if options.quick:
        told, choice = "The quick tests: unit, property and golden.", choose({}, is_quick=True)
    elif options.pytest and not options.all:
        told, choice = "The tests that were named.", of_pytest(options.pytest)
    elif options.all:
        told, choice = "All tests.", choose(everything)
    else:
        try:
            base = base_of(options.since)
        except NoHistory as error:
            if options.since is not None:
                parser.error(f"--since {options.since}: {error}")
            told, choice = f"All tests, because {error}.", choose(everything)
        else:
            told = f"The default tier, and the tiers of what changed since {base[:10]}:"
            choice = choose(whole_after(changed_since(base)))
    reasons = () if len(choice.whole) == len(TIERS) else choice.reasons
    print(told, *(f"  {line}" for line in reasons), sep="\n", file=sys.stderr)
    print(*choice.needs)
    print(*sorted(choice.whole), sep=",")
    print(*choice.paths)


if __name__ == "__main__":
    main(sys.argv[1:])
