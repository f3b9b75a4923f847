"""Rules for all source: randomness of tests, names of classes, lists of modules, plain English."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("tests/**/*.py"))
MODULES = ("random", "numpy.random", "secrets")
"""Nothing of these but what takes a seed."""
SEEDED = ("random.Random", "numpy.random.default_rng")
TYPES = ("numpy.random.Generator",)
FUNCTIONS = ("os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4")


def imported(tree: ast.Module) -> dict[str, str]:
    """The full name of every name that is imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """What a dotted name stands for; empty for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = full_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def without_seed(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of all randomness that is another one in each run."""
    tree = ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and full_name(node.func, names) in SEEDED:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not given or (isinstance(given[0], ast.Constant) and given[0].value is None):
                yield node.lineno, full_name(node.func, names)
        name = full_name(node, names)
        if name in FUNCTIONS or (
            name.rpartition(".")[0] in MODULES and name not in (*SEEDED, *TYPES)
        ):
            yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.urandom(8)",
        "from os import urandom as some\nsome(8)",
        "import random\nx = random.random()",
        "import random\nopen_it(random_bytes=random.randbytes)",
        "import random\nx = random.Random()",
        "import random\nx = random.Random(None)",
        "import random\nrandom.seed(1)",
        "from random import shuffle\nshuffle([])",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy.random\nnumpy.random.default_rng(seed=None)",
        "import secrets\nsecrets.token_hex()",
        "import uuid\nuuid.uuid4()",
    ],
)
def test_randomness_without_a_seed_is_found(source: str) -> None:
    assert [line for line, _ in without_seed(source)] == [2]


def test_randomness_with_a_seed_is_not() -> None:
    source = """
import os, random, uuid
import numpy as np
def shuffled(rng: random.Random, other: np.random.Generator): rng.shuffle([]), other.random()
shuffled(random.Random(7), np.random.default_rng(7)), os.path, uuid.UUID(int=7)
secrets = random.Random(f"secrets {7}").random()
"""
    assert list(without_seed(source)) == []


def test_all_randomness_has_a_seed() -> None:
    """Else a test that failed cannot fail again."""
    assert len(SOURCES) > 150
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in without_seed(path.read_text())
    ]
    assert found == []


BOTH_SIDES = {
    "DeadLetter",
    "DeliveryAttempt",
    "Heartbeat",
    "Schedule",
    "Source",
    "Subscription",
    "ConflictError",
    "DiskFullError",
    "NotFoundError",
    "OverloadedError",
    "FieldError",
    "Problem",
}
"""Classes that the server and its client library both have.

Each says the same on both sides: the server (or `storage`) raises or writes it, an answer carries
it over HTTP, and the client raises or reads it. Two words for it would be two things to learn."""

NAMED_BY_OTHERS = ("Meta",)
"""Django reads a class of that name in each model."""


def public_classes(source: str) -> Iterator[str]:
    """Names of the classes that a module defines for others, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name in NAMED_BY_OTHERS:
            continue
        if not node.name.startswith("_"):
            yield node.name


def defined_twice(modules: dict[str, str]) -> dict[str, list[str]]:
    """Public class names that stand for two things, with the modules (path → source) they are in.

    A name of BOTH_SIDES may stand once in the client library, and once outside of it."""
    places = defaultdict(list)
    for path, source in modules.items():
        for name in public_classes(source):
            places[name].append(path)
    return {
        name: paths
        for name, paths in sorted(places.items())
        if len(paths) > 1
        and not (
            name in BOTH_SIDES
            and len(paths) == 2
            and sum(path.startswith("delayserver/client/") for path in paths) == 1
        )
    }


def python_sources(*folders: str) -> dict[str, str]:
    """All Python files of these folders that git knows, with or without the suffix."""
    command = ["git", "ls-files", "-z", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = {}
    for path in filter(None, listed.split("\0")):
        data = (ROOT / path).read_bytes()
        first_line = data.partition(b"\n")[0]
        if path.endswith(".py") or (first_line.startswith(b"#!") and b"python" in first_line):
            sources[path] = data.decode()
    return sources


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ({"delayserver/one.py": "class Row: ...", "scripts/two": "class Row: ..."}, ["Row"]),
        ({"delayserver/one.py": "class Row: ...\nif 1:\n    class Row: ..."}, ["Row"]),
        ({"storage/one.py": "class _Row: ...", "storage/two.py": "class _Row: ..."}, []),
        ({"storage/one.py": "class Row: ...", "storage/two.py": "Row = tuple[int]"}, []),
        (
            {
                "delayserver/errors.py": "class ConflictError(Exception): ...",
                "delayserver/client/errors.py": "class ConflictError(Exception): ...",
            },
            [],
        ),
        (
            {
                "delayserver/errors.py": "class ConflictError(Exception): ...",
                "storage/errors.py": "class ConflictError(Exception): ...",
            },
            ["ConflictError"],
        ),
    ],
)
def test_a_class_name_for_two_things_is_found(modules: dict[str, str], names: list[str]) -> None:
    assert list(defined_twice(modules)) == names


def test_a_public_class_name_stands_for_one_thing() -> None:
    """Else a reader who finds the name has to find out which one is meant."""
    sources = python_sources("delayserver", "storage", "scripts")
    assert len(sources) > 250
    assert defined_twice(sources) == {}


def test_what_both_sides_have_is_on_both_sides() -> None:
    """Else a name is allowed twice that nobody needs twice."""
    client = "delayserver/client"
    sources = python_sources("delayserver", "storage", "scripts")
    of_client = {
        name
        for path, source in sources.items()
        if path.startswith(client)
        for name in public_classes(source)
    }
    of_others = {
        name
        for path, source in sources.items()
        if not path.startswith(client)
        for name in public_classes(source)
    }
    assert BOTH_SIDES - of_client == BOTH_SIDES - of_others == set()


# ---- names that say nothing ----------------------------------------------------------------------

PRONOUNS_AND_PARTICIPLES = """
All Any Anyone Both Each Every It Many More Most Much Nobody None One Other Others Own Several
Some Such That These They This Those What Which Who Whose Whom Of Begun Bound Brought Built Came
Caught Chosen Come Cut Done Drawn Driven Fed Felt Found Given Gone Grown Had Handed Heard Held
Hidden Kept Known Laid Led Left Lent Lost Made Meant Met Paid Put Read Risen Run Said Seen Sent
Set Shown Shut Sold Spent Split Spoken Spread Stood Taken Thought Thrown Told Torn Understood Want
Whole Won Written
"""
"""Pronouns, and participles that do not end in `ed`: alone they do not name the thing."""
SAYS_NOTHING = frozenset(PRONOUNS_AND_PARTICIPLES.split())
PARTICIPLE = re.compile(r"_?(?!Feed|Need|Seed|Speed)[A-Z][a-z]+ed")
NAMED_BY_PARTICIPLE = {
    "Aborted",
    "Accepted",
    "Adopted",
    "Archived",
    "Awaited",
    "Begun",
    "Changed",
    "Committed",
    "Compacted",
    "Completed",
    "Confirmed",
    "Defined",
    "Delivered",
    "Derived",
    "Done",
    "Ended",
    "Every",
    "Expired",
    "Exported",
    "Failed",
    "Filed",
    "Found",
    "Gone",
    "Heard",
    "Indexed",
    "Judged",
    "Known",
    "Leased",
    "Loaded",
    "Malformed",
    "Mended",
    "Moved",
    "Named",
    "Orphaned",
    "Parked",
    "Planned",
    "Published",
    "Pulled",
    "Recorded",
    "Recovered",
    "Refused",
    "Replayed",
    "Restored",
    "Settled",
    "Staged",
    "Stopped",
    "Stored",
    "Tried",
    "Undelivered",
    "Untried",
    "Verified",
    "Wanted",
    "Written",
    "_Begun",
    "_Done",
    "_Ended",
    "_Filed",
    "_Gathered",
    "_Granted",
    "_Joined",
    "_Many",
    "_Opened",
    "_Packed",
    "_Planned",
    "_Promised",
    "_Pulled",
    "_Read",
    "_Restored",
    "_Sealed",
    "_Seen",
    "_Split",
    "_Stored",
    "_Unanswered",
    "_Unfinished",
    "_Wanted",
}
"""Classes whose whole name is such a word. The list only gets shorter: call the class by the thing
that it holds (`LentPart`, not `Lent`)."""


def says_nothing(name: str) -> bool:
    """Whether a class name is a pronoun or a participle, and nothing else."""
    return name.lstrip("_") in SAYS_NOTHING or PARTICIPLE.fullmatch(name) is not None


def classes_that_say_nothing(source: str) -> Iterator[str]:
    """The names of such classes, and of aliases of a type at the top of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and says_nothing(node.name):
            yield node.name
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and says_nothing(target.id):
                    yield target.id


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Lent: ...\nclass LentPart: ...", ["Lent"]),
        ("class Outer:\n    class _Taken: ...", ["_Taken"]),
        ("Told = Callable[[bytes], None]\nWANTED = 1", ["Told"]),
        ("class Wanted: ...\nclass Feed: ...\nclass _Need: ...", ["Wanted"]),
        ("class WantedHour: ...\nwanted = 1\ndef f():\n    Told = 1", []),
    ],
)
def test_a_class_name_that_says_nothing_is_found(source: str, names: list[str]) -> None:
    assert list(classes_that_say_nothing(source)) == names


def test_a_class_is_not_named_by_a_participle_alone() -> None:
    """Else the reader of a line like `Lent()` has to look the class up."""
    sources = python_sources("delayserver", "storage")
    found = {name for source in sources.values() for name in classes_that_say_nothing(source)}
    assert found - NAMED_BY_PARTICIPLE == set(), "name it after the thing that it holds"
    assert NAMED_BY_PARTICIPLE - found == set(), "is gone: take it off the list"


# ---- strings that document an attribute ----------------------------------------------------------

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OF_NUMBERS = ("Since when", "How many", "How much", "How long")


def misplaced_strings(source: str) -> Iterator[int]:
    """Lines of strings that document nothing. Such a string is neither the first in a module, class
    or function, nor directly behind an assignment; or it speaks of a number, and the attribute in
    front of it is a truth value."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        pending += getattr(node, "handlers", ()) or getattr(node, "cases", ())
        for part in ("body", "orelse", "finalbody"):
            statements = getattr(node, part, ())
            if not isinstance(statements, list):  # of a lambda, or of an expression with `if`
                continue
            pending += statements
            is_documented = part == "body" and isinstance(node, DOCUMENTED)
            for before, statement in zip([None, *statements], statements, strict=False):
                text = string_of(statement)
                if text is None or (before is None and is_documented):
                    continue
                if not documents(text, before):
                    yield statement.lineno


def string_of(statement: ast.stmt) -> str | None:
    """The text of a statement that is nothing but a string."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def documents(text: str, before: ast.stmt | None) -> bool:
    """Whether the text may be that of the attribute in the statement before it."""
    if not isinstance(before, ast.Assign | ast.AnnAssign):
        return False
    value = before.value
    is_truth_value = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    return not (is_truth_value and text.startswith(OF_NUMBERS))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Module."""\nA = 1\n"""Of A."""', []),
        ('class C:\n    """Class."""\n    a: int\n    """Of a."""\n    b = 1\n    """Of b."""', []),
        ('def f(self):\n    """Function."""\n    self.a = 1\n    """Of a."""', []),
        ('"""Module."""\nimport os\n"""Of nothing."""', [3]),
        ('A = 1\n"""Of A."""\n"""Of B, which is gone."""', [3]),
        ('class C:\n    """Class."""\n    """And more."""', [3]),
        ('class C:\n    def f(self): ...\n    """Of f."""', [3]),
        ('def f():\n    """Function."""\n    run()\n    """Of nothing."""', [4]),
        ('def f():\n    if x:\n        """Of nothing."""', [3]),
        ('A = {1}\nA |= {2}\n"""Of A."""', [3]),
        ('def f(self):\n    self.a = False\n    """Since when it waits."""', [3]),
    ],
)
def test_a_string_that_documents_nothing_is_found(source: str, lines: list[int]) -> None:
    assert list(misplaced_strings(source)) == lines


def test_a_string_behind_an_attribute_documents_it() -> None:
    """Else it was left behind when its attribute moved, and is read as another one's."""
    sources = python_sources("delayserver", "storage", "scripts", "tests")
    assert len(sources) > 1000
    found = [
        f"{path}:{line}" for path, source in sources.items() for line in misplaced_strings(source)
    ]
    assert found == []


# ---- measures ------------------------------------------------------------------------------------

FILE_LINES_MAX = 600
CLASS_LINES_MAX = 400
METHODS_MAX = 30
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 10
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

OVERSIZED = {
    "delayserver/api/hot/protocol.py",
    "delayserver/api/hot/protocol.py:_HotProtocol",
    "delayserver/api/hot/protocol.py:_HotProtocol.data_received",
    "delayserver/api/intake.py",
    "delayserver/api/intake.py:Intake",
    "delayserver/decisions/messages.py:Messages.__init__",
    "delayserver/decisions/sequencer.py:Sequencer.append",
    "delayserver/delivery/dispatcher.py:Dispatcher.__init__",
    "delayserver/delivery/pump.py:Pump.__init__",
    "delayserver/integrations/celery/tasks.py:DelayedTasks.__init__",
    "delayserver/pipeline/load/load.py",
    "delayserver/pipeline/load/load.py:_Load",
    "delayserver/records/tables.py",
    "delayserver/recovery/standby.py:Standby",
    "delayserver/recovery/standby.py:Standby.__init__",
    "delayserver/serve/standby.py:StandbyFront.__init__",
    "delayserver/server/engine.py:Engine.__init__",
    "delayserver/shards/link.py",
}
"""Files, classes and functions that are larger than these measures. The list only gets shorter:
split a new one by the stories that it tells, and give each story its object."""
OVERSIZED_MAX = 18


def oversized(path: str, source: str) -> Iterator[str]:
    """The names of the file (`path`), its classes and functions (`path:Class.method`) that are.

    `self` and `cls` do not count as parameters."""
    if source.count("\n") > FILE_LINES_MAX:
        yield path
    yield from oversized_in(ast.parse(source), f"{path}:")


def oversized_in(parent: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | FUNCTION):
            yield from oversized_in(node, prefix)
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, FUNCTION) for one in node.body)
            is_too_large = lines > CLASS_LINES_MAX or methods > METHODS_MAX
        else:
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(given) - (given[:1] != [] and given[0].arg in ("self", "cls"))
            is_too_large = lines > FUNCTION_LINES_MAX or count > PARAMETERS_MAX
        if is_too_large:
            yield f"{prefix}{node.name}"
        yield from oversized_in(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("\n" * 600, []),
        ("\n" * 601, ["a.py"]),
        ("class C:" + "\n  a = 1" * 399, []),
        ("class C:" + "\n  a = 1" * 400, ["a.py:C"]),
        ("class C:" + "\n  def f(self): ..." * 30, []),
        ("class C:" + "\n  async def f(self): ..." * 31, ["a.py:C"]),
        ("def f():" + "\n  run()" * 59, []),
        ("if 1:\n def f():" + "\n  run()" * 60, ["a.py:f"]),
        ("class C:\n def f(self, a, /, b, c, d, e, *, g, h, i, j, k): ...", []),
        ("class C:\n def f(self, a, /, b, c, d, e, *, g, h, i, j, k, l): ...", ["a.py:C.f"]),
    ],
)
def test_what_is_too_large_is_found(source: str, names: list[str]) -> None:
    assert list(oversized("a.py", source)) == names


def test_nothing_grows_beyond_its_measure() -> None:
    """Else a reader cannot take in a file, a class or a function in one sitting."""
    sources = python_sources("delayserver", "storage")
    found = {name for path, source in sources.items() for name in oversized(path, source)}
    assert found - OVERSIZED == set(), "split it by the stories that it tells"
    assert OVERSIZED - found == set(), "is small enough, or is gone: take it off the list"
    assert len(OVERSIZED) <= OVERSIZED_MAX


# ---- construction in one step -------------------------------------------------------------------

DATA = {"dataclass", "NamedTuple", "Protocol", "TypedDict", "Struct", "BaseModel"}
"""Their machinery gives the fields their values."""


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, of `a.b.c[d]` and of `a.b.c(d)`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and last_name(node.value) in ("self", "cls")


def classes_without_data(sources: dict[str, str]) -> Iterator[tuple[str, ast.ClassDef]]:
    """Path and class, but for those whose fields are data, by themselves or by a base."""
    found = [
        (path, node)
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]
    data, before = DATA, 0
    while len(data) > before:
        before = len(data)
        data = data | {
            node.name
            for _, node in found
            if data & {last_name(base) for base in (*node.bases, *node.decorator_list)}
        }
    return ((path, node) for path, node in found if node.name not in data)


def built_later(sources: dict[str, str]) -> Iterator[str]:
    """`path:Class.attribute` of each that is declared, and to which `__init__` gives no value."""
    for path, node in classes_without_data(sources):
        bare: dict[str, None] = {}
        given: set[str] = set()
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                bare[last_name(statement.target)] = None
            for one in ast.walk(statement) if isinstance(statement, FUNCTION) else ():
                if isinstance(one, ast.AnnAssign) and one.value is None:
                    bare |= {last_name(one.target): None} if is_of_self(one.target) else {}
                elif getattr(statement, "name", "") == "__init__":
                    given |= assigned(one)
        yield from (f"{path}:{node.name}.{name}" for name in bare if name not in given)


def assigned(node: ast.AST) -> set[str]:
    """The attributes of `self` that a statement gives a value."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in ast.walk(target)]
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {last_name(one) for one in targets if is_of_self(one)}


def hooked(sources: dict[str, str]) -> Iterator[str]:
    """`path: target` of each callback (`on_…`, `may_…`) that one object gives another one."""
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if node.attr.startswith(("on_", "may_")) and not is_of_self(node):
                yield f"{path}: {ast.unparse(node)}"


BUILT_LATER = {
    "delayserver/api/hot/connection.py:Connection.access",
    "delayserver/api/hot/connection.py:Connection.on_lost",
    "delayserver/api/hot/connection.py:Connection.receiving",
    "delayserver/api/hot/connection.py:Connection.settings",
    "delayserver/api/hot/connection.py:Connection.unread",
    "delayserver/api/hot/heads.py:_HeadParser._parser",
    "delayserver/api/hot/protocol.py:_HotProtocol._head_data",
    "delayserver/api/hot/protocol.py:_HotProtocol._missing",
    "delayserver/api/hot/protocol.py:_HotProtocol._parts",
    "delayserver/api/hot/protocol.py:_HotProtocol.answers",
    "delayserver/api/hot/protocol.py:_HotProtocol.common",
    "delayserver/api/hot/protocol.py:_HotProtocol.common_of_cancels",
    "delayserver/api/hot/protocol.py:_HotProtocol.hot",
    "delayserver/api/hot/protocol.py:_HotProtocol.tokens",
    "delayserver/api/hot/protocol.py:_HotProtocol.turns",
    "delayserver/cli/demo/receiver.py:Receiver.port",
    "delayserver/client/definitions.py:ClientDefinitions._kind",
    "delayserver/cluster/keeping.py:ReplicaKeeper._owner_url",
    "delayserver/cluster/keeping.py:ReplicaKeeper._parting",
    "delayserver/cluster/keeping.py:ReplicaKeeper._replica",
    "delayserver/delivery/redis_sink.py:_Abrupt._writer",
    "delayserver/serve/standby.py:StandbyFront._acceptor",
    "delayserver/serve/standby.py:StandbyFront._forwarder",
    "delayserver/serve/standby.py:StandbyFront._protocol",
    "delayserver/shards/link.py:Links._application",
    "delayserver/shards/meeting.py:TcpMeeting._own",
    "delayserver/timers/hashed_wheel.py:Timeout.rounds",
}
"""Attributes that are declared, and that another object, or a later call, gives their value. The
list only gets shorter: hand a new one to `__init__`, or make the object when the value is there."""
BUILT_LATER_MAX = 27
HOOKED = {
    "delayserver/serve/acceptor.py: protocol.on_lost",
    "delayserver/server/consumer_calls.py: self._engine.dispatcher.pulls.on_ready",
    "delayserver/server/server.py: files.on_sync",
    "delayserver/parts/sources/runner.py: self._sources.on_changed",
    "delayserver/server/subscription_calls.py: self._engine.subscribing.on_failing",
    "delayserver/server/subscription_calls.py: self._engine.subscribing.on_paused",
    "delayserver/shards/token_rates.py: tokens.on_taken",
    "delayserver/timers/asyncio_driver.py: timer.on_error",
}
"""Callbacks that one object puts into another one. The list only gets shorter: hand the callback to
`__init__`, or call a port (`EnginePorts`)."""
HOOKED_MAX = 8


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class C:\n  a: int\n  def __init__(self): ...", ["a.py:C.a"]),
        ("class C:\n  def __init__(self):\n    self.a: int", ["a.py:C.a"]),
        ("class C:\n  def f(self):\n    self.a: int", ["a.py:C.a"]),
        ("class C:\n  a: int\n  def f(self):\n    self.a = 1", ["a.py:C.a"]),
        ("class C:\n  def __init__(self, b):\n    self.a: int\n    b.a = 1", ["a.py:C.a"]),
        ("class C:\n  a: int = 1", []),
        ("class C:\n  a: int\n  def __init__(self):\n    self.a = 1", []),
        ("class C:\n  def __init__(self):\n    self.a: int\n    self.a, b = 1, 2", []),
        ("class C:\n  a: int\n  def __init__(self):\n    if 1:\n      self.a: int = 1", []),
        ("class C(Protocol):\n  a: int", []),
        ("@dataclass(slots=True)\nclass C:\n  a: int", []),
        ("class B(m.Struct): ...\nclass C(B[int]):\n  a: int", []),
    ],
)
def test_an_attribute_without_a_value_is_found(source: str, names: list[str]) -> None:
    assert list(built_later({"a.py": source})) == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(a):\n  a.on_end = f", ["a.py: a.on_end"]),
        ("class C:\n  def __init__(self):\n    self.b.on_end = f", ["a.py: self.b.on_end"]),
        ("class C:\n  def __init__(self):\n    self.on_end = f", []),
        ("def f(a):\n  a.count = 1\n  return a.on_end", []),
    ],
)
def test_a_callback_of_another_object_is_found(source: str, names: list[str]) -> None:
    assert list(hooked({"a.py": source})) == names


def test_objects_are_whole_when_they_are_made() -> None:
    """Else a reader who has read `__init__` does not know yet what the object does."""
    sources = python_sources("delayserver", "storage")
    for found, listed, most in (
        ({*built_later(sources)}, BUILT_LATER, BUILT_LATER_MAX),
        ({*hooked(sources)}, HOOKED, HOOKED_MAX),
    ):
        assert found - listed == set(), "give it a value in __init__"
        assert listed - found == set(), "is whole, or is gone: take it off the list"
        assert len(listed) <= most


# ---- the modules of a folder ---------------------------------------------------------------------

PACKAGES = sorted(
    path for root in ("delayserver", "storage") for path in ROOT.glob(f"{root}/**/__init__.py")
)


@pytest.mark.parametrize("init", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_folder_lists_its_modules_in_reading_order(init: Path) -> None:
    """Each has a line that begins with its name, and the list names nothing else."""
    modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    first_words = [line.split()[0].rstrip("/") for line in text.splitlines() if line.strip()]
    assert modules <= {*first_words}, "the docstring says what each module is for"
    _, _, behind = text.partition("eading order:\n\n")
    listed = [line.split()[0].rstrip("/") for line in behind.split("\n\n")[0].splitlines()]
    assert {*listed} <= modules, "the list has names that are not there"
    assert len(listed) == len({*listed})


# ---- plain English -------------------------------------------------------------------------------

OPENING = re.compile(r"(?:What|Of|Who|Nobody)\b")
"""A sentence that begins like this hides its actor; "what" stands for a thing that has a name."""
CODE = re.compile(r"^```.*?^```$|``[^`]*``|`[^`]*`|(?<=\])\([^)\s]*\)", re.DOTALL | re.MULTILINE)
"""In a document or a docstring, also the target of a link."""
PROSE = re.compile(r'"""([^"]*(?:"(?!"")[^"]*)*)"""|((?:^ *#.*\n)+)|  (#.*)$', re.MULTILINE)
"""In a module: docstrings, and comments of their own lines or behind code."""
BREAK = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\s\|\s|(?<=[.!?])\s+")
"""Between two sentences, items, or cells of a table."""
LIMITS = {
    "docs": (0.2, 1.0),
    "delayserver": (0.0, 0.0),
    "delayserver/api": (0.2, 0.8),
    "delayserver/backup": (0.0, 0.0),
    "delayserver/cli": (0.0, 0.0),
    "delayserver/client": (0.0, 0.1),
    "delayserver/cluster": (0.0, 0.2),
    "delayserver/decisions": (0.3, 0.7),
    "delayserver/delivery": (0.0, 0.4),
    "delayserver/examples": (0.0, 1.0),
    "delayserver/http": (0.0, 1.7),
    "delayserver/integrations": (0.0, 0.0),
    "delayserver/parts": (1.8, 7.0),
    "delayserver/pipeline": (0.0, 0.0),
    "delayserver/queries": (0.0, 0.0),
    "delayserver/records": (0.7, 1.6),
    "delayserver/recovery": (0.0, 0.0),
    "delayserver/schedule": (0.4, 1.0),
    "delayserver/security": (0.0, 0.0),
    "delayserver/serve": (0.0, 0.0),
    "delayserver/server": (0.0, 0.7),
    "delayserver/shards": (0.0, 0.0),
    "delayserver/timers": (0.0, 0.5),
    "delayserver/wire": (0.0, 0.0),
    "storage": (0.5, 0.9),
    "storage/replicated": (0.0, 0.3),
    "together": (0.2, 0.6),
}
"""By folder: such sentences in a hundred, and "what" in a thousand words. Lower a limit when you
have rewritten a folder; never raise one."""


def prose_of(path: str, source: str) -> str:
    """The English of a file: a document without its code, a module's docstrings and comments."""
    if path.endswith(".py"):
        found = ("".join(groups) for groups in PROSE.findall(source))
        source = "\n\n".join(re.sub(r"(?m)^ *#+:?", "", text) for text in found)
    return CODE.sub("x", source)


def figures_of(prose: str) -> tuple[float, float]:
    """Hidden actors in a hundred sentences, and "what" in a thousand words."""
    sentences = [
        sentence for text in BREAK.split(f"\n{prose}") if (sentence := text.strip(" \n*|-"))
    ]
    words = re.findall(r"[a-z']+", prose.lower())
    hidden = sum(OPENING.match(sentence) is not None for sentence in sentences)
    return (
        round(100 * hidden / max(1, len(sentences)), 1),
        round(1000 * words.count("what") / max(1, len(words)), 1),
    )


@pytest.mark.parametrize(
    ("path", "source", "figures"),
    [
        ("a.md", "Who asks, waits. The server answers.", (50.0, 0.0)),
        ("a.md", "- Of many one is taken.\n- Another waits.", (50.0, 0.0)),
        ("a.md", "| State | Meaning |\n|---|---|\n| open | What waits. |", (25.0, 200.0)),
        ("a.md", "Read [this](#what).\n\n```\nWhat is code?\n```\nRun `what`.", (0.0, 0.0)),
        ("a.py", '"""Nobody hears it."""\nx = "What"\n', (100.0, 0.0)),
        ("a.py", "# One thought\n#\n# What follows\nx = 1  # Of what?\n", (66.7, 333.3)),
    ],
)
def test_a_sentence_without_its_actor_is_found(
    path: str, source: str, figures: tuple[float, float]
) -> None:
    assert figures_of(prose_of(path, source)) == figures


def test_the_english_only_gets_plainer() -> None:
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for path, source in python_sources("delayserver", "storage").items():
        folders["/".join(path.split("/")[:-1][:2])].append(prose_of(path, source))
    for document in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        folders["docs"].append(prose_of(document.name, document.read_text("utf-8")))
    folders["together"] = [text for texts in folders.values() for text in texts]
    figures = {folder: figures_of("\n\n".join(texts)) for folder, texts in folders.items()}
    assert figures.keys() == LIMITS.keys()
    worse = {
        folder: (figure, LIMITS[folder])
        for folder, figure in figures.items()
        if figure[0] > LIMITS[folder][0] or figure[1] > LIMITS[folder][1]
    }
    assert worse == {}, "name the actor first, then the verb and the consequence"
