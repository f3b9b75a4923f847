"""What holds for the source of all tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/**/*.py", "*/testing.py", "*/testing/**/*.py")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(folder))
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
