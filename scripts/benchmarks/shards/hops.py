"""What the hop to another shard costs, and what more shards cost, in processor time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import wrk
from levels.bench import (
    BATCH,
    PUBLISHERS,
    QUICK_CONNECTIONS,
    Bench,
    batches_tomorrow,
    one_message,
    publish,
    rate_of,
)
from report import Figure

from shards.rates import TURN_S, load_of
from shards.serving import Apart, Sharded, all_sharded, apart, keys_of
from shards.sides import Load, Side, add_rate, by_turns, median, ours, ratio, server_us, together

SUBJECT = "bench.post"
"""That of `one_message`."""
HOP_TURNS = 6
HOP_CONNECTIONS = 64
HOP_LEVEL = 1.6
KEYS_PER_S = 90_000
"""More than one shard publishes."""
COUNTS = (1, 2, 4, 8)
COUNTS_QUICK = (1, 2)
CURVE_TURNS = 3
CURVE_CONNECTIONS = 64
"""To each shard, so that as many publishes come together in each."""
CURVE_LEVEL = 1.25
"""Times the processor time of one shard, where each request goes to its owner."""


def hop(bench: Bench) -> None:
    """Publishes with keys to the shard that they belong to, and to the other one."""
    connections = bench.size.of(quick=QUICK_CONNECTIONS, usual=HOP_CONNECTIONS)
    turns = bench.size.of(quick=1, usual=HOP_TURNS)
    seconds = bench.size.of(quick=1, usual=TURN_S)
    with all_sharded(bench, "hop", (2,)) as servers:
        server = servers[2]

        def posting(which: int) -> Side:
            def turn(number: int) -> Load:
                owner = number % 2
                # Keys differ from turn to turn: a repetition is another thing.
                prefix = f"{number * 2 + which:02d}"
                keys = keys_of(owner, 2, SUBJECT, prefix, KEYS_PER_S * seconds)
                port = server.ports[owner ^ which]
                body = one_message(wrk.KEY_PLACE)
                posts = wrk.post(port, "/v1/messages", body, connections, seconds, listed=keys)
                return load_of(posts)

            return ours(server, turn)

        before = server.accepted()
        sides = {"right": posting(0), "wrong": posting(1)}
        done = by_turns(bench, f"POST, keys, {connections} conn.", sides, turns)
        accepted = server.accepted() - before
    figures = [
        add_rate(bench, f"POST to the {name} shard, keys, {connections} conn.", done[name])
        for name in sides
    ]
    cost = ratio(done["wrong"], done["right"], server_us)
    figures[1].ratios["CPU, right"] = cost
    figures[1].demand(f"≤ {HOP_LEVEL} × the processor time", cost <= HOP_LEVEL)
    sent = sum(turn.load.count for some in done.values() for turn in some)
    within = sent <= accepted <= sent + connections * 2 * turns
    figures[1].expect("accepted, within those on their way", within, True)


def curve(bench: Bench) -> None:
    """Processor time for a message with 1, 2, 4 and 8 shards: flat where the owner is asked, as far
    as the machine has a core for each. What it takes where there is none, as many servers show that
    know nothing of one another."""
    counts = bench.size.of(quick=COUNTS_QUICK, usual=COUNTS)
    turns = bench.size.of(quick=1, usual=CURVE_TURNS)
    batches = batches_tomorrow(keyed=True)
    first = 0
    with (
        all_sharded(bench, "curve", counts) as servers,
        ExitStack() as stack,
        ThreadPoolExecutor(max(counts)) as threads,
    ):
        more = (count for count in counts if count > 1)
        others = {count: stack.enter_context(apart(bench, "curve", count)) for count in more}

        def to_owners(server: Sharded) -> Callable[[int], Load]:
            return lambda number: _post_to_owners(bench, threads, server, number)

        def to_each(servers: Apart) -> Callable[[int], Load]:
            def work(number: int) -> Load:
                posting = partial(_post_alone, bench, _connections(bench), number)
                return together(threads, (partial(posting, port) for port in servers.ports))

            return work

        def to_any(server: Sharded) -> Callable[[int], Load]:
            def work(number: int) -> Load:
                connections = server.count * _connections(bench)
                body = one_message(f"any-{number}-{wrk.KEY_PLACE}")
                seconds = bench.size.of(quick=1, usual=TURN_S)
                return load_of(wrk.post(server.port, "/v1/messages", body, connections, seconds))

            return work

        def in_batches(server: Sharded) -> Callable[[int], Load]:
            def work(number: int) -> Load:
                nonlocal first
                seconds = bench.size.of(quick=0.1, usual=float(TURN_S))
                sent = publish(bench, server.port, batches, seconds=seconds, first_process=first)
                first += PUBLISHERS
                return Load(sum(one.messages for one in sent), rate_of(sent), 0.0, 0.0)

            return work

        for what, work in (
            ("POST to the owners", to_owners),
            ("POST to any", to_any),
            (f"batch of {BATCH} to any", in_batches),
        ):
            sides = {str(count): ours(server, work(server)) for count, server in servers.items()}
            if work is to_owners:
                sides |= {f"{n} alone": ours(some, to_each(some)) for n, some in others.items()}
            done = by_turns(bench, f"{what}, keys, shards", sides, turns)
            at_one = median(done["1"], server_us)
            for count in counts:
                of_count = done[str(count)]
                cost = median(of_count, server_us)
                shards = "1 shard" if count == 1 else f"{count} shards"
                figure = bench.add(Figure(f"{what}, keys, {shards}", cost, "µs CPU"))
                beside = figure.ratios["1 shard"] = ratio(of_count, done["1"], server_us)
                if what == "POST to the owners" and count > 1:
                    figure.demand(f"≤ {CURVE_LEVEL} × one shard", beside <= CURVE_LEVEL)
                bench.curves.setdefault(what, {})[count] = cost
                if (alone := done.get(f"{count} alone")) is not None:
                    figure.ratios["as many servers"] = ratio(of_count, alone, server_us)
                    cost = median(alone, server_us)
                    bench.add(Figure(f"POST, keys, {count} servers alone", cost, "µs CPU"))
                    bench.curves.setdefault("POST to servers alone", {1: at_one})[count] = cost


def _post_to_owners(
    bench: Bench, threads: ThreadPoolExecutor, server: Sharded, number: int
) -> Load:
    """To each shard, at the same time, what belongs to it."""
    seconds, connections = bench.size.of(quick=1, usual=TURN_S), _connections(bench)
    body = one_message(wrk.KEY_PLACE)
    each = KEYS_PER_S * seconds * 2 // server.count
    keys = [keys_of(k, server.count, SUBJECT, f"{number:02d}", each) for k in range(server.count)]

    def post(shard: int) -> Load:
        port = server.ports[shard]
        posts = wrk.post(port, "/v1/messages", body, connections, seconds, listed=keys[shard])
        return load_of(posts)

    return together(threads, (partial(post, shard) for shard in range(server.count)))


def _post_alone(bench: Bench, connections: int, number: int, port: int) -> Load:
    """To a server alone, as it is done to one shard."""
    body = one_message(f"alone-{number}-{wrk.KEY_PLACE}")
    seconds = bench.size.of(quick=1, usual=TURN_S)
    return load_of(wrk.post(port, "/v1/messages", body, connections, seconds))


def _connections(bench: Bench) -> int:
    return bench.size.of(quick=QUICK_CONNECTIONS, usual=CURVE_CONNECTIONS)
