"""The alerts as the tests use them: read, shortened, and judged by promtool.

`shortened` is the one transformation between the rules that are shipped and those that a test can
wait for. What a `for` and a window are, is for promtool, which has a clock of its own: it is given
series of hours, and the rules as they are.
"""

import importlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sinks.programs import need

yaml: Any = importlib.import_module("yaml")
"""Comes with schemathesis, and without types."""
ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
JOB = "delayserver"
STEP_S = 30
"""Between two samples of a series, and two evaluations, of promtool."""
FOR, WINDOW, STEP, HORIZON_S = "400ms", "5s", "200ms", 20
OUT_OF_REACH = {
    "DelayserverMemory": ("2 * 1024 ^ 3", "1024"),
    "DelayserverCoreFull": ("> 0.9", "> 0.001"),
    "DelayserverLoopHeld": ("> 0.1", "> 0"),
    "DelayserverDescriptors": ("> 0.9", "> 0.0001"),
    "DelayserverBackupLogBehind": ("> 300", "> 2"),
    "DelayserverRestarting": ("[15m]) > 1", "[60s]) > 0"),
}
"""Levels for which a test had to use up memory, cores and descriptors, to wait for minutes, or to
start a server twice in a window, and those it takes instead. Of a start the window is longer than
one may take."""


def alerts() -> dict[str, dict[str, Any]]:
    """The rules, by the name of their alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def shortened() -> str:
    """The rules with every `for` and every window so short that a test can wait for it, with a
    forecast of four windows as before, and with the levels that are out of its reach within it.
    Nothing else is another."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            if rule["alert"] in OUT_OF_REACH:
                level, instead = OUT_OF_REACH[rule["alert"]]
                assert level in rule["expr"], rule
                rule["expr"] = rule["expr"].replace(level, instead)
            rule["expr"] = re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", rule["expr"])
            rule["expr"] = re.sub(r"\[\d+[mh]:\d+s\]", f"[{WINDOW}:{STEP}]", rule["expr"])
            rule["expr"] = rule["expr"].replace("], 86400)", f"], {HORIZON_S})")
            assert not re.search(r"\[\d+[mh]|86400", rule["expr"]), rule
            if "for" in rule:
                rule["for"] = FOR
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text


@dataclass(frozen=True)
class Case:
    """An alert, what has it fire, and since when, in minutes (None: not within `quiet`)."""

    alert: str
    series: Mapping[str, str]
    """Samples by series, in promtool's short form, one each STEP_S."""
    quiet: float
    """Until then it does not."""
    fires: float | None
    ends: float | None = field(default=None)
    """Then it does no more."""

    def checks(self) -> Iterable[tuple[float, int]]:
        """Moments, and whether it fires then."""
        yield self.quiet, 0
        if self.fires is not None:
            yield self.fires, 1
        if self.ends is not None:
            yield self.ends, 0


def judge(directory: Path, cases: Iterable[Case]) -> str:
    """What promtool says of these cases; nothing if all are so.

    It makes a database for each of its tests, which costs half a second. So cases share one, each
    with a job of its own; those that are about all jobs stand alone."""
    shared, tests = _test("the cases with a job", {}), []
    for number, case in enumerate(cases):
        job = f"{JOB}-{number}"
        is_alone = not any(f'job="{JOB}"' in name for name in case.series)
        test = _test(case.alert, case.series) if is_alone else shared
        if is_alone:
            tests.append(test)
        else:
            renamed = {
                name.replace(f'job="{JOB}"', f'job="{job}"'): one
                for name, one in case.series.items()
            }
            test["input_series"] += _test("", renamed)["input_series"]
        of_job = "" if is_alone else f', job="{job}"'
        firing = f'ALERTS{{alertname="{case.alert}", alertstate="firing"{of_job}}}'
        test["promql_expr_test"] += [
            {
                "expr": f"count({firing}) or vector(0)",
                "eval_time": f"{minutes * 60:.0f}s",
                "exp_samples": [{"labels": "{}", "value": value}],
            }
            for minutes, value in case.checks()
        ]
    tests.append(shared)
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{STEP_S}s", "tests": tests}
    path = directory / "cases.yml"
    path.write_text(yaml.safe_dump(document))
    return promtool("test", "rules", str(path))


def _test(name: str, series: Mapping[str, str]) -> dict[str, Any]:
    given = [{"series": one, "values": values} for one, values in series.items()]
    return {
        "name": name,
        "interval": f"{STEP_S}s",
        "input_series": given,
        "promql_expr_test": [],
    }


def promtool(*words: str) -> str:
    """What it complains about; nothing if it is content."""
    done = subprocess.run(
        [need("promtool", "ensure_prometheus"), *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def fires(directory: Path, alert: str, metrics: str) -> str:
    """Whether an alert fires where `/metrics` of a process goes on to be this text: nothing if it
    does, else what promtool says."""
    series = {}
    for line in metrics.splitlines():
        sample, _, value = line.rpartition(" ")
        # Not a number is like nothing, and promtool has no word for it.
        if line and not line.startswith("#") and value != "NaN":
            name, _, rest = sample.partition("{")
            labels = ",".join(one for one in (rest.removesuffix("}"), f'job="{JOB}"') if one)
            series[f"{name}{{{labels}}}"] = f"{value}x240"
    return judge(directory, [Case(alert, series, 0, 90)])
