"""A Python for Spark that has imported what its workers need before it forks them.

Spark asks Python about a source several times for each table that is read, each time in a process
of its own, which imports Spark's modules and ours: almost a second of a processor. A job reads a
few tables, but these tests read hundreds.

The sessions of single tests (`test_jvm_ends`), and commands that tests run as users do, have the
Python that users have.
"""

import sys
from pathlib import Path

_SCRIPT = """\
#!{python}
import importlib, os, runpy, sys

if sys.argv[1:3] != ["-m", "pyspark.daemon"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
del sys.argv[1:3]
for name in (*sys.argv[1:], *{modules}):
    importlib.import_module(name)
runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
"""
_MODULES = (
    "delayserver.pipeline.archive.source",
    "delayserver.pipeline.logs.source",
    "delayserver.pipeline.publish.publish",
    "delayserver.pipeline.states.history",
    "delayserver.pipeline.states.states",
)


def make_forking_python(directory: Path) -> Path:
    """A program that Spark may run in place of this Python."""
    script = directory / "python"
    script.write_text(_SCRIPT.format(python=sys.executable, modules=_MODULES))
    script.chmod(0o755)
    return script
