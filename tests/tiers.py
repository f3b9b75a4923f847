"""Chooses the tests of a run: the default tier, and whole the tiers of the folders that changed.

    TIERS     each test file belongs to one tier. A tier names the tests of it that always run
    FOLDERS   each folder of the project names the tiers that run whole when a file in it changes

A change counts from the newest commit whose committer date lies 24 hours or more before that of
HEAD, so all that landed within a day is tested whole, whoever landed it. Files that are not
committed yet count, too. A clone without that history (shallow, or no repository) runs everything.

scripts/test calls this before there is an environment, so it needs Python alone:

    python tests/tiers.py [--all | --quick] [--since COMMIT]

prints for scripts/test which programs and jars are needed, in a second line which tiers are whole,
and then the paths for pytest, a line each. It tells on stderr which tiers it chose, and why.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).resolve().parent
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
            "integration/test_bench.py::test_timers",
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
            "pipeline/load/test_files.py",
            "pipeline/load/test_load.py::test_rows_become_messages",
            "pipeline/load/test_note.py",
            "pipeline/load/test_reading.py",
            "pipeline/load/test_staging.py",
            "pipeline/load/test_text.py",
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
    ),
    Tier(
        "topics",
        ("pipeline/topics/**",),
        always=("pipeline/topics/test_folding.py",),
        needs=(*SPARKS, *KAFKA),
    ),
    Tier("spark", ("pipeline/**",), always=(), needs=SPARKS),
    Tier(
        "crash",
        ("crash/**",),
        always=("crash/test_brokers.py", "crash/test_crash.py::test_killed_again_and_again"),
    ),
    Tier("chaos", ("chaos/**",)),
    Tier(
        "soak", ("soak/**",), always=("soak/test_soak.py::test_a_figure_that_is_not_flat_is_told",)
    ),
    Tier("observe", ("observe/**",), always=("observe/test_dashboards.py",), needs=("prometheus",)),
)

_PIPELINE = ("load", "archive", "audits", "reading", "topics", "spark")
_ALL = tuple(tier.name for tier in TIERS)

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "storage": ("simulation", "audits", "crash"),
    "storage/replicated": ("brokers", "cluster"),
    "storage/staging.py": ("simulation", "load"),
    "delayserver": ("simulation", "shards"),
    "delayserver/api": ("shards", "celery"),
    "delayserver/api/hot": ("shards", "crash"),
    "delayserver/api/rest": ("shards", "console"),
    "delayserver/api/cluster": (),
    "delayserver/backup": ("simulation", "crash"),
    "delayserver/cli": ("shards",),
    "delayserver/cli/pipeline.py": ("load", "archive"),
    "delayserver/cli/pipeline_archive.py": ("archive",),
    "delayserver/cli/pipeline_export.py": ("audits",),
    "delayserver/cli/pipeline_lateness.py": ("reading",),
    "delayserver/cli/pipeline_load.py": ("load",),
    "delayserver/cli/pipeline_watch.py": ("topics",),
    "delayserver/cli/cluster": ("brokers", "cluster"),
    "delayserver/cli/demo": ("shards", "crash", "soak"),
    "delayserver/cluster": ("cluster", "shards"),
    "delayserver/client": ("shards", "celery", "load"),
    "delayserver/console": ("console",),
    "delayserver/decisions": ("simulation",),
    "delayserver/delivery": ("simulation", "sinks"),
    "delayserver/examples": (),
    "delayserver/http": ("load", "celery"),
    "delayserver/integrations": ("celery",),
    "delayserver/integrations/celery": ("celery",),
    "delayserver/pipeline": ("spark", "load", "audits"),
    "delayserver/pipeline/session.py": _PIPELINE,
    "delayserver/pipeline/archive": ("archive",),
    "delayserver/pipeline/audits": ("audits", "topics", "reading"),
    "delayserver/pipeline/exports": ("audits",),
    "delayserver/pipeline/load": ("load",),
    "delayserver/pipeline/logs": ("reading", "audits"),
    "delayserver/pipeline/publish": ("load",),
    "delayserver/pipeline/reports": ("reading", "audits", "spark"),
    "delayserver/pipeline/states": ("audits", "reading"),
    "delayserver/pipeline/topics": ("topics",),
    "delayserver/parts": ("simulation", "shards"),
    "delayserver/parts/heartbeats": ("simulation", "shards"),
    "delayserver/parts/attempts": ("simulation", "shards"),
    "delayserver/parts/imports": ("simulation", "load", "archive"),
    "delayserver/parts/schedules": ("simulation", "shards"),
    "delayserver/parts/sources": ("simulation", "brokers"),
    "delayserver/queries": ("shards",),
    "delayserver/wire": ("shards", "celery"),
    "delayserver/records": ("simulation", "audits"),
    "delayserver/recovery": ("simulation", "crash"),
    "delayserver/schedule": ("simulation",),
    "delayserver/security": ("shards",),
    "delayserver/serve": ("cluster", "shards", "celery"),
    "delayserver/server": ("simulation", "observe"),
    "delayserver/shards": ("cluster", "shards"),
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
    "scripts/s3": ("archive", "audits"),
    "scripts/s3.txt": ("archive", "audits"),
    "scripts/soak": ("soak",),
    "scripts/spark-kafka.pom.xml": ("topics",),
    # All tests use these; the default tier meets each thing that they do.
    "tests/accounting.py": (),
    "tests/budget.py": (),
    "tests/conftest.py": (),
    "tests/depth.py": ("simulation",),
    "tests/tiers.py": (),
}
"""The tiers that run whole when a file below the folder changes; the longest name that fits counts.
A tier that always runs whole is not named: a change of `timers` is seen by its unit tests.

Tests have no rows. A test file runs the tier that it belongs to, and a module that tests share runs
the tiers of the files that import it."""


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
    longest = max((name for name in FOLDERS if path.is_relative_to(name)), key=len, default="")
    if longest or path.parts[0] != "tests":
        return FOLDERS.get(longest, ())
    if not (ROOT / path).is_file():
        return ()  # The files that used it have changed, too.
    users = [changed] if path.name.startswith("test_") else _test_files_that_use(changed)
    if not users and path.suffix != ".md":
        users = [f"{path.parent}/test_data"]  # Data belong to the tier of their folder.
    try:
        return tuple(dict.fromkeys(tier_of(file).name for file in users))
    except LookupError:
        if path.name.startswith("test_"):
            raise
        return ()


_IMPORT = re.compile(
    r"^\s*(?:from\s+(tests[\w.]*)\s+import\s+(\([^)]*\)|[^\n]+)|import\s+(tests[\w.]+))",
    re.MULTILINE,
)


@cache
def _imported() -> dict[str, set[str]]:
    """The modules of tests/ that each file there imports, as paths; a conftest.py is one of all
    files below it."""
    files = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for file in files:
        named: set[str] = set()
        for module, names, alone in _IMPORT.findall((ROOT / file).read_text("utf-8")):
            named |= {alone or module, *(f"{module}.{one}" for one in re.findall(r"\w+", names))}
        found[file] = files & {f"{one.replace('.', '/')}.py" for one in named}
        if PurePosixPath(file).name.startswith("test_"):
            parents = list(PurePosixPath(file).parents)[:-2]
            found[file] |= files & {f"{parent}/conftest.py" for parent in parents}
    return found


def _test_files_that_use(helper: str) -> list[str]:
    """The test files that import a module of tests/, themselves or through others."""
    users, new = {helper}, {helper}
    while new:
        new = {file for file, imported in _imported().items() if imported & new} - users
        users |= new
    return sorted(file for file in users if PurePosixPath(file).name.startswith("test_"))


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
    some = [tier for tier in TIERS if tier.always is not None or tier.is_sampled]
    lines = [f"whole: {tier.name} ({whole[tier.name]})" for tier in some if tier.name in whole]
    return Choice(frozenset(whole), tuple(paths), tuple(dict.fromkeys(needs)), tuple(lines))


def of_pytest(arguments: Iterable[str]) -> Choice:
    """The needs of tests that are named as pytest takes them; all needs where none is a path."""
    paths = []
    for before, one in pairwise(["", *arguments]):
        path = (ROOT / one.partition("::")[0]).resolve()
        # The value of an option is no path, e.g. that of `-k docs`.
        if (before[:1] != "-" or before in FLAGS) and path.is_relative_to(TESTS):
            if not path.exists():
                raise FileNotFoundError(f"{one} is not there")
            paths.append(path)
    needs = [
        need
        for tier in TIERS
        for need in tier.needs
        if not paths
        or any((ROOT / file).is_relative_to(path) for file in files_of(tier) for path in paths)
    ]
    everything = frozenset(tier.name for tier in TIERS)
    return Choice(everything, (), tuple(dict.fromkeys(needs)), ())


FLAGS = {
    "-x",
    "-v",
    "-vv",
    "-q",
    "-s",
    "-l",
    "-rs",
    "-ra",
    "--lf",
    "--ff",
    "--sw",
    "--pdb",
    "--quiet",
}
"""Options of pytest that take no value."""


# ── what has changed ──────────────────────────────────────────────────────────────────────────


class NoHistory(Exception):
    """The commits of the last day cannot be looked at; the text says why."""


def base_of(since: str | None) -> str:
    """The commit that a change is compared with. Raises NoHistory."""
    if since is not None:
        return _git("rev-parse", "--verify", f"{since}^{{commit}}")
    if Path(_git("rev-parse", "--show-toplevel")) != ROOT:
        raise NoHistory("this is a part of another repository")
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise NoHistory("the clone is shallow")
    # First parents: a branch that is merged today counts as a change of today, however old its
    # commits are. Clocks differ, so all commits above the last one that is too new count, too.
    lines = _git("log", "--first-parent", "--format=%ct %H").splitlines()
    dated = [(int(line.split()[0]), line.split()[1]) for line in lines]
    too_new = [at for at, (at_s, _) in enumerate(dated) if at_s > dated[0][0] - DAY_S]
    if too_new[-1] + 1 == len(dated):
        raise NoHistory("no commit is a day older than HEAD")
    return dated[too_new[-1] + 1][1]


def changed_since(commit: str) -> list[str]:
    """Paths of the files that differ from a commit, and of those that git does not know yet."""
    known = _git("diff", "--name-only", "--no-renames", "-z", commit)
    new = _git("ls-files", "--others", "--exclude-standard", "-z")
    return [file for file in f"{known}\0{new}".split("\0") if file]


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=True,
        )
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
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--all", action="store_true")
    one_of.add_argument("--quick", action="store_true")
    one_of.add_argument("--since", metavar="COMMIT")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest: no tier is chosen")
    options = parser.parse_args(arguments)
    everything = {tier.name: "--all" for tier in TIERS}
    if options.quick:
        told, choice = "The quick tests: unit, property and golden.", choose({}, is_quick=True)
    elif options.pytest and options.since is None and not options.all:
        try:
            choice = of_pytest(options.pytest)
            told = "The tests that were named."
        except FileNotFoundError as error:
            parser.error(str(error))
    elif options.all:
        told, choice = "All tests.", replace(choose(everything), reasons=())
    else:
        try:
            base = base_of(options.since)
        except NoHistory as error:
            if options.since is not None:
                parser.error(f"--since {options.since}: {error}")
            told = f"All tests, because {error}."
            choice = replace(choose(everything), reasons=())
        else:
            told = f"The default tier, and all of the tiers of what changed since {base[:10]}:"
            try:
                choice = choose(whole_after(changed_since(base)))
            except LookupError as error:
                parser.error(str(error))
    if told.endswith(":") and not choice.reasons:
        told = f"{told[:-1]}, which adds none."
    print(told, *(f"  {line}" for line in choice.reasons), sep="\n", file=sys.stderr)
    print(*choice.needs)
    print(*sorted(choice.whole), sep=",")
    print(*choice.paths, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
