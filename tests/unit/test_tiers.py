"""Each file belongs to a tier, each folder names its tiers, and a change is found from git."""

import ast
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import FOLDERS, ROOT, TIERS, NoHistory, base_of, choose, tier_of, tiers_for
from tests.unit.test_mirrors import ELSEWHERE

DAY_S = 24 * 60 * 60
NOW_S = 1_800_000_000
BY_NAME = {tier.name: tier for tier in TIERS}
Git = Callable[..., str]


def test_every_test_file_belongs_to_a_tier() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")]
    assert len(files) > 400
    assert {tier_of(file).name for file in files} == {*BY_NAME}
    assert sorted(files) == sorted(file for tier in TIERS for file in tiers.files_of(tier))


def test_the_page_for_contributors_lists_them() -> None:
    text = (ROOT / "tests" / "README.md").read_text("utf-8")
    table = text.partition("\n## The tiers\n")[2].partition("\n## ")[0]
    assert {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")} == {
        *BY_NAME
    }


def test_a_file_of_no_tier_is_named() -> None:
    with pytest.raises(LookupError, match="belongs to no tier"):
        tier_of("tests/nowhere/test_it.py")


def test_no_folder_of_the_product_is_missing() -> None:
    """A folder with modules has a row of its own; anything else may share that of its parent."""
    paths = [path for top in ("delayserver", "storage") for path in (ROOT / top).rglob("*.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in paths}
    assert len(folders) > 35
    assert folders - {*FOLDERS} == set(), "add its tiers to FOLDERS in tests/tiers.py"
    for top in ("deploy", "scripts"):
        for path in (ROOT / top).rglob("*"):
            file = path.relative_to(ROOT)
            assert any(file.is_relative_to(name) for name in FOLDERS), file


def test_no_row_is_of_something_that_is_gone() -> None:
    assert [name for name in FOLDERS if not (ROOT / name).exists()] == []
    assert {one for names in FOLDERS.values() for one in names} <= {*BY_NAME}


def test_a_module_runs_the_tests_that_are_its_own() -> None:
    for file, modules in ELSEWHERE.items():
        tier, name = tier_of(file), file.removeprefix("tests/")
        for module in modules:
            runs = tier.name in tiers_for(module) or tier.always is None
            assert runs or name in (tier.always or ()), f"{module}: {tier.name}"


def test_what_tests_share_runs_the_tiers_that_use_it() -> None:
    assert tiers_for("tests/integration/celery_support.py") == ("celery",)
    assert {"audits", "reading", "spark"} <= {*tiers_for("tests/pipeline/store.py")}
    assert {"sinks", "console", "shards"} <= {*tiers_for("tests/forked_servers.py")}
    assert tiers_for("tests/simulation/caught.json") == ("simulation",)
    assert tiers_for("tests/observe/test_that_was_deleted.py") == ()


def test_the_longest_name_counts() -> None:
    assert tiers_for("storage/frame.py") == FOLDERS["storage"]
    assert tiers_for("storage/replicated/lease.py") == FOLDERS["storage/replicated"]
    assert tiers_for("tests/console/test_console.py") == ("console",)
    assert tiers_for("tests/sinks/contract.py") == ("sinks",)
    assert tiers_for("README.md") == FOLDERS.get("README.md", ())


def names_in(path: Path) -> set[str]:
    """Test functions and classes of a file; a class is followed to its bases in the same folder."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("tier", [one for one in TIERS if one.always], ids=lambda one: one.name)
def test_what_always_runs_exists(tier: tiers.Tier) -> None:
    for name in tier.always or ():
        file, *inside = name.split("::")
        assert tier_of(f"tests/{file}") is tier, name
        if inside:
            assert inside[0] in names_in(ROOT / "tests" / file), name


def test_each_kind_of_real_part_is_met_by_the_default_tier() -> None:
    needs = {*choose({}).needs}
    assert {"chromium", "java", "kafka", "nats", "rabbitmq", "redis"} <= needs
    quick = choose({}, is_quick=True)
    assert {tier_of(path.partition("::")[0]).name for path in quick.paths} == {
        "unit",
        "property",
        "golden",
    }


def test_a_tier_that_is_whole_has_all_of_its_files() -> None:
    some, whole = choose({}), choose({"cluster": "changed: storage/replicated"})
    files = {f for f in whole.paths if f.startswith("tests/cluster/")}
    assert {*tiers.files_of(BY_NAME["cluster"])} <= files
    assert len(whole.paths) > len(some.paths)
    assert whole.reasons == ("whole: cluster (changed: storage/replicated)",)


def test_the_reason_names_folders() -> None:
    found = tiers.whole_after(["tests/chaos/times.py", "tests/console/test_console.py"])
    assert found == {"chaos": "changed: tests/chaos", "console": "changed: tests/console"}


# ── which commit a change is compared with ────────────────────────────────────────────────────


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Runs git in a repository of its own, which `tiers` looks at."""
    monkeypatch.setattr(tiers, "ROOT", tmp_path)

    def run(*words: str, at_s: int = NOW_S) -> str:
        dates = {"GIT_COMMITTER_DATE": f"{at_s} +0000", "GIT_AUTHOR_DATE": f"{at_s} +0000"}
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *who, *words],
            cwd=tmp_path,
            env={**os.environ, **dates, "GIT_CONFIG_GLOBAL": os.devnull},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    run("init", "--quiet")
    return run


def commit(git: Git, name: str, at_s: int) -> str:
    (tiers.ROOT / name).write_text(name)
    git("add", name)
    git("commit", "--quiet", "--message", name, at_s=at_s)
    return git("rev-parse", "HEAD")


def test_the_base_is_the_newest_commit_that_is_a_day_older_than_head(git: Git) -> None:
    commit(git, "a", NOW_S - 3 * DAY_S)
    base = commit(git, "b", NOW_S - DAY_S)
    commit(git, "c", NOW_S - DAY_S + 1)
    commit(git, "d", NOW_S)
    (tiers.ROOT / "d").write_text("changed")
    (tiers.ROOT / "é e").write_text("not added")
    assert base_of(None) == base
    assert tiers.changed_since(base) == ["c", "d", "é e"]


def test_a_merge_of_something_newer_hides_no_older_commit(git: Git) -> None:
    base = commit(git, "a", NOW_S - 2 * DAY_S)
    git("checkout", "--quiet", "-b", "side")
    commit(git, "b", NOW_S - 10)
    git("checkout", "--quiet", "main")
    commit(git, "c", NOW_S - 5)
    git("merge", "--quiet", "--no-edit", "side", at_s=NOW_S)
    assert base_of(None) == base


def test_a_branch_that_is_merged_today_counts_whole(git: Git) -> None:
    base = commit(git, "a", NOW_S - 9 * DAY_S)
    git("checkout", "--quiet", "-b", "side")
    commit(git, "b", NOW_S - 3 * DAY_S)
    git("checkout", "--quiet", "main")
    git("merge", "--quiet", "--no-ff", "--no-edit", "side", at_s=NOW_S)
    assert base_of(None) == base
    assert tiers.changed_since(base) == ["b"]


def test_a_clock_that_was_wrong_hides_no_commit(git: Git) -> None:
    base = commit(git, "a", NOW_S - 2 * DAY_S)
    commit(git, "b", NOW_S - 10)
    commit(git, "c", NOW_S - 2 * DAY_S)
    commit(git, "d", NOW_S)
    assert base_of(None) == base


def test_named_tests_need_their_programs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words, needs in (
        (["tests/console", "-x"], "chromium"),
        (["-k", "docs", "tests/unit/test_docs.py::test_every_link_leads_somewhere"], "systemd"),
        (["-x", "tests/sinks/test_nats.py"], "redis nats rabbitmq java kafka"),
    ):
        tiers.main(["--", *words])
        assert capsys.readouterr().out.split("\n")[0] == needs, words
    with pytest.raises(SystemExit):
        tiers.main(["--", "tests/unit/typo.py"])
    assert "tests/unit/typo.py is not there" in capsys.readouterr().err


def test_without_a_day_of_history_everything_runs(git: Git) -> None:
    first = commit(git, "a", NOW_S - DAY_S + 1)
    commit(git, "b", NOW_S)
    with pytest.raises(NoHistory, match="no commit is a day older"):
        base_of(None)
    assert base_of(first[:12]) == first
    with pytest.raises(NoHistory, match="git rev-parse: "):
        base_of("nonsense")


def test_a_shallow_clone_runs_everything(git: Git, tmp_path: Path) -> None:
    commit(git, "a", NOW_S - 2 * DAY_S)
    commit(git, "b", NOW_S)
    git("clone", "--quiet", "--depth=1", f"file://{tmp_path}", "shallow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "ROOT", tmp_path / "shallow")
        with pytest.raises(NoHistory, match="shallow"):
            base_of(None)


def test_what_is_no_repository_runs_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    with pytest.raises(NoHistory, match="not a git repository"):
        base_of(None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--all"], "All tests."),
        (["--quick"], "The quick tests"),
        (["--since", "HEAD"], "The default tier"),
    ],
)
def test_the_choice_is_three_lines(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.main(options)
    printed = capsys.readouterr()
    assert not printed.err.rstrip("\n").endswith(":"), "the heading of an empty list"
    needs, whole, *paths = printed.out.rstrip("\n").split("\n")
    assert printed.err.startswith(told)
    assert "tests/unit/test_tiers.py" in paths
    if options == ["--all"]:
        assert {*whole.split(",")} == {*BY_NAME} and "prometheus" in needs.split()


def test_a_commit_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tiers.main(["--since", "nonsense"])
    assert ended.value.code == 2
    assert "--since nonsense: git rev-parse" in capsys.readouterr().err
