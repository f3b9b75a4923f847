"""Metrics of several shards as one text for Prometheus, and those of a process on standby: each
sample has a label `shard`.

The samples of a family have to stand together, below one HELP and one TYPE, so the texts are taken
apart by their HELP lines and put together family by family. A shard that does not answer takes none
of the others with it: an operator needs the metrics of the others most at that moment. One more
family says which shards have answered.

Not the parser of prometheus_client: it makes objects of every sample, and a family of every name,
where only a label has to be put in.

Cost: 1 µs per line. Threads: pure functions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

Figure = tuple[str, str, Callable[[], float]]
"""Name, text and value of a metric of the process."""

_HELP: Final = "# HELP "
_ANSWERS: Final = (
    "# HELP delayserver_shard_answers Whether the shard has answered what its metrics are\n"
    "# TYPE delayserver_shard_answers gauge\n"
)
_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


def merge_metrics(texts: Mapping[int, str | None]) -> str:
    """The metrics of shards, by their numbers, each as `generate_latest` writes them; None: of one
    that has not answered."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for shard, text in texts.items():
        if text is None:
            continue
        name = ""
        is_new = False
        for line in text.split("\n"):
            if line.startswith(_HELP):
                name = line.removeprefix(_HELP).partition(" ")[0]
                is_new = name not in heads
            if line.startswith("#"):
                if is_new:
                    heads.setdefault(name, []).append(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, shard))
    lines = (line for name, head in heads.items() for line in (*head, *samples.get(name, ())))
    answers = (
        f'delayserver_shard_answers{{shard="{shard}"}} {int(text is not None)}\n'
        for shard, text in texts.items()
    )
    return "".join((*(f"{line}\n" for line in lines), _ANSWERS, *answers))


def standby_metrics(
    shard: int,
    *,
    lag_records: int | None,
    lag_s: float | None,
    unseen_nodes: int,
    clock_differs: bool,
    has_replica: bool,
    besides: Sequence[tuple[str, str, float]] = (),
) -> str:
    """The metrics of a process on standby, which has no server. `lag_records`, `lag_s`: how far its
    replica is behind; None: it has none, or none yet. `besides`: name, text and
    value of others."""
    families = (
        ("standby_lag_records", "Records of the shard's log that were not read", lag_records),
        ("standby_lag_seconds", "How long ago all of the shard's log was filed", lag_s),
        ("unseen_nodes", "Other nodes that cannot be reached from this one", unseen_nodes),
        ("standby_clock_differs", "Whether the owner's clock is another one", int(clock_differs)),
        ("standby_has_replica", "Whether this node is to have the shard", int(has_replica)),
        *besides,
    )
    return "".join(
        f"# HELP delayserver_{name} {text}\n"
        f"# TYPE delayserver_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        f'delayserver_{name}{{shard="{shard}"}} {"NaN" if value is None else value}\n'
        for name, text, value in families
    )


def _labelled(line: str, shard: int) -> str:
    """A sample with one more label."""
    name = _NAME.match(line)
    assert name is not None, line
    rest = line[name.end() :]
    return f'{name[0]}{{shard="{shard}"' + (f",{rest[1:]}" if rest[0] == "{" else f"}}{rest}")
