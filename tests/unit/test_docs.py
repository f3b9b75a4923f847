"""The documents say what is true: their tables are those of the code, and what they name exists."""

import ast
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import delayserver
from delayserver.cli import make_app
from delayserver.cli.serve import flag
from delayserver.config import Settings, by_heading
from scripts.documents import DOCUMENTS
from tests.tiers import tier_of

ROOT = Path(__file__).parents[2]
README_BYTES_MAX = 10 * 1024
CHANGE_CHARACTERS_MAX = 320
"""With its links."""
PROJECT = ("README.md", "CONTRIBUTING.md", "tests/README.md", "tests/EVIDENCE.md")
"""Besides all of docs/. CHANGELOG.md speaks of other times."""

SCRIPT_OPTIONS = {"--rounds", "--minutes", "--seed", "--cycles", "--only"}
"""Of scripts/crash and the simulation."""

NAMES = sorted([*PROJECT, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w/.-])(?:(?:delayserver|storage|tests|scripts|docs)(?:/[\w-]+)*/[\w.-]*\w)"
)
MODULE = re.compile(r"\bdelayserver(?:\.[a-z_]+)+(?=[\s`]|$)")
DEFINED = re.compile(r"`((?:delayserver|storage|tests)/[\w/]+\.py)`\s\(((?:`[\w.]+`(?:,\s)?)+)\)")
"""A file, and in brackets what is defined in it."""


@cache
def text_of(name: str) -> str:
    """A document."""
    return (ROOT / name).read_text("utf-8")


def blocks(name: str, language: str = "") -> list[str]:
    """The blocks of code in a language."""
    return [code for found, code in BLOCK.findall(text_of(name)) if found == language]


def prose(name: str) -> str:
    """A document without its blocks of code."""
    return BLOCK.sub("", text_of(name))


def code_of(name: str) -> Iterator[str]:
    """Code in the lines of a document, and the lines of its blocks; a line that goes on is one."""
    yield from CODE.findall(prose(name))
    for block in blocks(name):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()


# ── tables and sizes ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_settings_that_are_listed_are_those_of_the_code(path: Path) -> None:
    document = path.read_text("utf-8")
    assert DOCUMENTS[path](document) == document, "run scripts/docs"


def test_the_tables_have_each_setting_once() -> None:
    found = re.findall(r"^\| `--([a-z-]+)` \|", text_of("docs/configuration.md"), re.MULTILINE)
    names = [name.replace("-", "_") for name in found]
    assert sorted(names) == sorted(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_the_basic_settings_stand_before_the_advanced_ones() -> None:
    before, _, behind = text_of("docs/configuration.md").partition("\n## Advanced: ")
    for heading, names in by_heading().items():
        for name in names:
            is_advanced = heading.value.startswith("Advanced: ")
            assert f"| `{flag(name)}` |" in (behind if is_advanced else before), name


def test_the_settings_file_of_the_example_is_one() -> None:
    (example,) = blocks("docs/configuration.md", "toml")
    assert Settings(**tomllib.loads(example)).retention_ms == 7 * 86_400_000


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").encode()) <= README_BYTES_MAX


def test_the_readme_begins_with_the_two_commands() -> None:
    assert [block.strip() for block in blocks("README.md")][1:3] == ["scripts/run", "scripts/test"]


def test_the_version_is_in_the_changelog() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", delayserver.__version__]


def test_a_change_is_a_short_line_of_the_changelog() -> None:
    """The rest stands where its link leads."""
    unreleased = text_of("CHANGELOG.md").partition("## [Unreleased]\n")[2].partition("\n## [")[0]
    found = re.findall(r"^- (.+(?:\n  .+)*)", unreleased, re.MULTILINE)
    assert len(found) == unreleased.count("\n- ")
    items = [" ".join(item.split()) for item in found]
    assert [item for item in items if len(item) > CHANGE_CHARACTERS_MAX] == []
    assert [item for item, count in Counter(items).items() if count > 1] == []
    assert list(lost_links("CHANGELOG.md", unreleased)) == []


def test_every_document_is_in_the_index() -> None:
    index = text_of("docs/README.md")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in index, path


def test_every_decision_is_in_the_index() -> None:
    directory = ROOT / "docs" / "decisions"
    index = (directory / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| \[(.+?)\]\((.+?)\) \| (.*)\|$", index, re.MULTILINE)
    numbers = [int(number) for number, *_ in rows]
    assert numbers == sorted(set(numbers)) and numbers[0] == 1
    gaps = sorted(set(range(1, numbers[-1])) - set(numbers))
    *most, last = map(str, gaps)
    assert f"\nThe numbers {', '.join(most)} and {last} were not used.\n" in index
    files = sorted(path.name for path in directory.glob("[0-9]*.md"))
    assert [file for _, _, file, _ in rows] == files
    for number, title, file, replaced_by in rows:
        text = (directory / file).read_text("utf-8")
        says = re.findall(r"^Replaced in part by (\[(\d+)\]\(.+?\)): ", text, re.MULTILINE)
        assert replaced_by.rstrip() == ", ".join(link for link, _ in says), file
        assert all(int(number) < int(by) for _, by in says), file
        assert file.startswith(f"{int(number):04}-")
        assert text.startswith(f"# {number}. {title}\n"), file
        found = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert found == ["Context", "Decision", "Alternatives", "Look again when"], file


def defined_words(glossary: str) -> Iterator[str]:
    """The words that a glossary defines: those in bold, and those in italics before a colon."""
    for line in glossary.splitlines():
        if line.startswith("|"):
            yield from re.findall(r"\*\*([^*]+)\*\*", line)
            yield from re.findall(r"(?<!\*)\*([^*]+)\*:", line)


def test_a_word_that_is_defined_twice_is_found() -> None:
    rows = "| **run** | sorted rows; *seq*: a number |\n| **key run** | keys of a *seq* |"
    assert list(defined_words(rows)) == ["run", "seq", "key run"]
    again = "\n| **schedule** | a **run** of it is a message |"
    assert list(defined_words(rows + again))[-1] == "run"


def test_the_glossary_defines_each_word_once() -> None:
    glossary = text_of("docs/glossary.md")
    words = list(defined_words(glossary))
    assert len(words) > 100
    assert [word for word, count in Counter(words).items() if count > 1] == []
    assert "Also:" not in glossary, "a second meaning is another word"


OF_ONE_MEANING = ("place", "run", "watch", "adopt", "verdict", "group", "replay")
"""Words that had several meanings (docs/glossary.md names the other words now)."""
QUALIFIED = {"commit group", "watch key", "key run"}
"""Terms that have such a word in them, beside the word itself."""


def second_meanings(words: Iterable[str]) -> list[str]:
    """Terms that define one of OF_ONE_MEANING once more, such as `run of rows` beside `run`."""
    return [
        word
        for word in words
        if word not in OF_ONE_MEANING
        and word not in QUALIFIED
        and not {*word.split()}.isdisjoint(OF_ONE_MEANING)
    ]


def test_a_second_meaning_of_a_word_is_found() -> None:
    words = ["run", "run of rows", "key run", "stopwatch", "watch of a cluster"]
    assert second_meanings(words) == ["run of rows", "watch of a cluster"]


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    """Else a reader has to find out from the place which one is meant."""
    words = list(defined_words(text_of("docs/glossary.md")))
    assert second_meanings(words) == []
    assert {*words} >= QUALIFIED, "is gone: take it off the list"


def test_every_invariant_names_bugs_that_are_planted() -> None:
    bugs = set()
    names = ("canaries", "invariants", "replicated_log", "replicas")
    for file in (f"test_{name}.py" for name in names):
        for node in ast.parse(text_of(f"tests/simulation/{file}")).body:
            if isinstance(node, ast.FunctionDef) and [one.arg for one in node.args.args] == [
                "patch"
            ]:
                bugs.add(node.name)
    text = text_of("docs/guarantees.md")
    sections = dict(re.findall(r"^### (I\d+): .+?\n(.+?)(?=^### )", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == [f"I{number}" for number in range(1, 19)]
    for invariant, section in sections.items():
        assert any(f"`{bug}`" in section for bug in bugs), invariant
    assert [bug for bug in sorted(bugs) if f"`{bug}`" not in text] == []


PROMISE = re.compile(r"\| \*\*(?P<promise>.+)\*\* \| (?P<moment>.+) \| (?P<tests>.+) \|")
NODE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ONLY_WHOLE = {"An export names rot and does not keep it"}
"""Promises whose tests run only with the whole of their tier."""


def promises() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """The rows that docs/guarantees.md has for users: the promise, its moment, and its tests."""
    text = text_of("docs/guarantees.md").partition("\n## For users\n")[2].partition("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("|") and line not in ("| Promise | Holds | Test |", "|---|---|---|"):
            row = PROMISE.fullmatch(line)
            assert row is not None, f"no promise with its moment and its tests: {line}"
            tests = NODE.findall(row["tests"])
            assert ", ".join(f"`{file}::{name}`" for file, name in tests) == row["tests"], line
            yield row["promise"], row["moment"], tests


def test_every_promise_has_a_test_of_its_name() -> None:
    """The first one; and each test that is named beside it exists."""
    lost, names = [], []
    for promise, moment, tests in promises():
        assert moment.endswith("."), f"at which moment does it hold: {promise}"
        words = re.findall(r"[a-z0-9]+", promise.lower())
        assert tests[0][1] == "_".join(["test", *words]), promise
        names.append(tests[0][1])
        for file, name in tests:
            path = ROOT / file
            if not path.exists() or name not in defined_in(path):
                lost.append(f"{file}::{name}")
    assert lost == []
    assert len(names) == len(set(names)) > 80


def test_every_promise_is_tested_whatever_has_changed() -> None:
    """By the default tier: one of its tests at least."""
    only_whole = set()
    for promise, _, tests in promises():
        for file, name in tests:
            always, path = tier_of(file).always, file.removeprefix("tests/")
            if always is None or path in always or f"{path}::{name}" in always:
                break
        else:
            only_whole.add(promise)
    assert only_whole == ONLY_WHOLE


# ── what documents name ────────────────────────────────────────────────────────────────────────


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def lost_links(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Links in the text of a document that lead nowhere."""
    for link in (first or second for first, second in LINK.findall(text)):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        if not path.exists():
            yield name, link
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                yield name, link


def test_every_link_leads_somewhere() -> None:
    assert [lost for name in NAMES for lost in lost_links(name, prose(name))] == []


def test_every_file_that_is_named_exists() -> None:
    lost = []
    for name in NAMES:
        for code in code_of(name):
            lost += [(name, path) for path in PATH.findall(code) if not (ROOT / path).exists()]
    assert lost == []


def test_every_module_that_is_named_exists() -> None:
    lost = []
    for name in NAMES:
        for module in {module for code in code_of(name) for module in MODULE.findall(code)}:
            parent, _, last = module.rpartition(".")
            try:
                found = find_spec(module) is not None or hasattr(import_module(parent), last)
            except ModuleNotFoundError:
                found = False
            if not found:
                lost.append((name, module))
    assert lost == []


def defined_in(path: Path) -> set[str]:
    """The functions and classes of a module, and the methods of these."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return names


def test_every_function_of_the_reading_order_exists() -> None:
    lost, count = [], 0
    for name in NAMES:
        for file, functions in DEFINED.findall(text_of(name)):
            wanted = re.findall(r"`([\w.]+)`", functions)
            count += len(wanted)
            path = ROOT / file
            known = defined_in(path) if path.exists() else set()
            lost += [(name, file, function) for function in wanted if function not in known]
    assert count > 20
    assert lost == []


def test_every_script_exists() -> None:
    for name in NAMES:
        for script in set(re.findall(r"\bscripts/[a-z]+\b(?!/)(?:\.[a-z]+)?", text_of(name))):
            assert (ROOT / script).is_file(), (name, script)
        for benchmark in re.findall(r"`scripts/bench ([a-z]+)", text_of(name)):
            assert re.search(
                rf"^#   scripts/bench \[?{benchmark}\b", text_of("scripts/bench"), re.M
            )


def command_lines(name: str) -> Iterator[list[str]]:
    """What the document says of the command `delayserver`, without that word."""
    for code in code_of(name):
        line = re.sub(r"^(?:\$ )?(?:[A-Z_]+='[^']*' )?(?:\.venv/bin/)?", "", code)
        if line.startswith("delayserver "):
            yield shlex.split(line.replace("…", " "), comments=True)[1:]


def test_every_command_and_its_options_exist() -> None:
    whole: Any = typer.main.get_command(make_app())
    every_option = {"--help"}
    for name in NAMES:
        for words in command_lines(name):
            command, options = whole, {"--help"}
            for word in words:
                if not word.startswith("-") and hasattr(command, "commands"):
                    assert word in command.commands, (name, words)
                    command = command.commands[word]
                for parameter in command.params:
                    options.update(parameter.opts, parameter.secondary_opts)
                if word.startswith("--"):
                    assert word.partition("=")[0] in options, (name, words, word)
            every_option |= options
    assert {"--port", "--scope", "--dry-run"} <= every_option


def test_every_option_that_stands_alone_exists() -> None:
    groups: list[Any] = [typer.main.get_command(make_app())]
    known = {"--help"}
    for command in groups:
        groups += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known.update(parameter.opts, parameter.secondary_opts)
    for name in NAMES:
        for code in CODE.findall(prose(name)):
            option = re.match(r"--[a-z-]+", code)
            assert option is None or option[0] in known | SCRIPT_OPTIONS, (name, code)


def test_the_programs_compile() -> None:
    for name in NAMES:
        for program in blocks(name, "python"):
            compile(program, name, "exec")


def test_json_of_one_line_is_json() -> None:
    for name in NAMES:
        for line in (line for block in blocks(name) for line in block.splitlines()):
            if line.startswith('{"'):
                json.loads(line.replace("…", ""))


def test_the_timer_example_runs() -> None:
    (example,) = blocks("docs/timers.md", "python")
    smaller = example.replace("1_000_000", "10_000").replace("500_000", "5_000")
    exec(compile(smaller, "docs/timers.md", "exec"), {})
