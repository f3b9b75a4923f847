"""Tasks of Celery that wait in a real server: real workers, a real Redis, and kills of each."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from tests.integration.api_support import ApiServer, make_token
from tests.integration.celery_support import DUE_S, Redis, Shop, tasks_over
from tests.waiting import wait_until

DOCUMENT = Path(__file__).parents[2] / "docs" / "celery.md"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Call to deprecated setex:DeprecationWarning"  # by Celery, of the client of Redis
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    store = Redis(tmp_path_factory.mktemp("redis"))
    yield store
    store.kill()


@pytest.fixture
def make_shop(tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def make(*arguments: str, **options: str) -> Shop:
        shops.append(Shop(tmp_path, *arguments, **options))
        return shops[-1]

    yield make
    for shop in shops:
        shop.end()


# ── what apply_async can do ────────────────────────────────────────────────────────────────────


class Sent:
    """Tasks of all kinds, sent at once, so that all of them are waited for together; by their ids,
    since results of Celery keep a connection to Redis as long as they are there."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        tasks = shop.app.tasks
        run, again, fail, start = (tasks[name] for name in ("run", "again", "fail", "start"))
        sends = run.apply_async
        self.sent_at = time.time()
        self.at = datetime.now(UTC) + timedelta(seconds=DUE_S)
        self.plain = sends(("plain",), countdown=DUE_S).id
        self.eta = sends(("eta",), eta=self.at).id
        self.routed = sends(("routed",), countdown=DUE_S, queue="other", priority=6).id
        self.packed = sends(("packed" * 200,), countdown=DUE_S, compression="zlib").id
        self.by_name = shop.app.send_task("run", ("by name",), countdown=DUE_S).id
        self.chosen = sends(("chosen",), countdown=DUE_S, task_id=f"{shop.subject}-id").id
        chained: Any = chain(run.si("first"), run.si("second").set(countdown=DUE_S)).apply_async()
        self.first, self.second = chained.parent.id, chained.id
        members: Any = group(run.si(f"member-{n}") for n in range(3)).apply_async(countdown=DUE_S)
        self.members = [one.id for one in members]
        heads = [run.si("head-1").set(countdown=DUE_S), run.si("head-2")]
        self.tail = chord(heads, run.s()).apply_async().id
        self.linked = sends(("linked",), countdown=DUE_S, link=run.si("link")).id
        self.failing = fail.apply_async(countdown=DUE_S, link_error=run.si("errback")).id
        self.retried = again.apply_async(("again",), countdown=DUE_S).id
        self.starting = start.apply_async(countdown=DUE_S).id
        self.expiring = sends(("late",), countdown=DUE_S, expires=DUE_S / 2).id
        self.in_time = sends(("in time",), countdown=DUE_S, expires=60).id
        revoked = sends(("revoked",), countdown=3 * DUE_S)
        revoked.revoke()
        self.revoked = revoked.id
        self.last = sends(("last",), countdown=3 * DUE_S).id
        self.soon = sends(("soon",), countdown=0.5).id
        self.now = run.delay("now").id

    def state(self, task_id: str) -> str:
        return str(self.shop.app.backend.get_state(task_id))

    def result(self, task_id: str) -> object:
        """Of a task, once it is done."""
        wait_until(lambda: self.state(task_id) in ("SUCCESS", "FAILURE", "REVOKED"))
        return self.shop.app.backend.get_result(task_id)

    def run(self, task_id: str) -> list[str]:
        """The line of a task that ran, once."""
        self.shop.until_run([task_id])
        (run,) = [run for run in self.shop.runs if run[0] == task_id]
        return run

    def moment(self, task_id: str) -> float:
        """When it ran."""
        return float(self.run(task_id)[-1])


@pytest.fixture(scope="module")
def sent(
    store: Redis, shared_api: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sent]:
    server, broker, results = shared_api.process.url, store.url(0), store.url(1)
    shop = Shop(tmp_path_factory.mktemp("shop"), server, broker, results)
    shop.worker("-Q", "shop,other").until_told("ready.")
    try:
        yield Sent(shop)
    finally:
        shop.end()


def test_a_task_comes_when_it_is_due_and_not_before(sent):
    for task_id in (sent.plain, sent.eta, sent.routed, sent.by_name, sent.chosen):
        late_s = sent.moment(task_id) - sent.sent_at - DUE_S
        assert 0 <= late_s < 10
    assert sent.moment(sent.eta) >= sent.at.timestamp()


def test_its_result_and_its_id_are_those_that_the_sender_has(sent):
    assert sent.result(sent.plain) == "plain"
    assert sent.result(sent.packed) == "packed" * 200
    assert sent.chosen == f"{sent.shop.subject}-id"
    assert sent.result(sent.chosen) == "chosen"


def test_it_comes_to_its_queue_with_its_priority(sent):
    assert sent.run(sent.routed)[1:4] == ["routed", "other", "6"]


def test_what_is_due_soon_goes_to_the_broker(sent, shared_api):
    for task_id in (sent.now, sent.soon):
        sent.run(task_id)
        shared_api.ask("GET", f"/v1/subjects/{sent.shop.subject}/keys/{task_id}", 404)


def test_chains_groups_and_chords_hold_together(sent):
    assert sent.moment(sent.second) - sent.moment(sent.first) >= DUE_S
    assert [sent.result(one) for one in sent.members] == ["member-0", "member-1", "member-2"]
    assert sent.result(sent.tail) == ["head-1", "head-2"]


def test_callbacks_are_called(sent):
    assert isinstance(sent.result(sent.failing), ValueError)
    wait_until(lambda: {"link", "errback"} <= {run[1] for run in sent.shop.runs})


def test_a_retry_waits_in_the_server_too(sent, shared_api):
    assert sent.result(sent.retried) == 1
    first, second = (run for run in sent.shop.runs if run[0] == sent.retried)
    assert (first[1], second[1]) == ("again-0", "again-1")
    assert float(second[-1]) - float(first[-1]) >= DUE_S
    stored = shared_api.ask("GET", f"/v1/subjects/{sent.shop.subject}/keys/{sent.retried}")
    assert stored["body"]["headers"]["retries"] == 1


def test_a_worker_sends_too(sent):
    assert sent.moment(f"{sent.starting}-child") - sent.moment(sent.starting) >= DUE_S


def test_what_has_expired_is_not_run(sent):
    assert sent.result(sent.in_time) == "in time"
    assert isinstance(sent.result(sent.expiring), TaskRevokedError)
    assert sent.expiring not in sent.shop.counts


def test_what_was_revoked_is_cancelled_and_its_state_says_so(sent, shared_api):
    stored = shared_api.ask("GET", f"/v1/subjects/{sent.shop.subject}/keys/{sent.revoked}")
    assert stored["state"] == "cancelled"
    assert sent.state(sent.revoked) == "REVOKED"
    sent.run(sent.last)  # which is due later
    assert sent.revoked not in sent.shop.counts


def test_each_ran_once(sent):
    ids = [sent.plain, sent.eta, sent.routed, sent.chosen, sent.linked, sent.in_time]
    sent.shop.until_run([*ids, sent.tail])
    assert {sent.shop.counts[one] for one in ids} == {1}


# ── kills ──────────────────────────────────────────────────────────────────────────────────────


def test_no_task_runs_twice_over_planned_restarts(make_shop, make_api, store):
    api = make_api()
    api.start()
    # A broker of its own: workers of other tests take from the same queue.
    shop = make_shop(api.process.url, store.url(4))
    sent = tasks_over(api, shop, restarts=3)
    assert {shop.counts[one] for one in sent} == {1}


def test_kills_of_workers_servers_and_brokers_lose_nothing(make_shop, make_api, tmp_path):
    api, store = make_api(), Redis(tmp_path)
    api.start()
    try:
        shop = make_shop(api.process.url, store.url(0))
        # Before its lease, and while it is leased: the broker hangs, and the worker is killed.
        worker = shop.worker()
        worker.until_told("ready.")
        store.process.send(signal.SIGSTOP)
        leased = shop.send(10)
        before = shop.send(10, countdown=4)
        wait_until(lambda: shop.states(api, leased) == {"delivering"})
        worker.kill()
        assert shop.states(api, before) == {"scheduled"}
        store.process.send(signal.SIGCONT)
        forwarder = shop.forwarder()
        wait_until(lambda: shop.states(api, [*leased, *before]) == {"delivered"})
        # Behind it: the broker has it, and loses its process and whoever forwards.
        acked = shop.send(10)
        wait_until(lambda: shop.states(api, acked) == {"delivered"})
        forwarder.kill()
        store.kill()
        # Both are away when tasks are due; the server meanwhile is killed, too.
        waiting = shop.send(10)
        forwarder = shop.forwarder()
        api.restart(kill=True)
        wait_until(lambda: "is away" in forwarder.log)
        wait_until(lambda: shop.states(api, waiting) == {"delivering"})
        store.start()
        wait_until(lambda: shop.states(api, waiting) == {"delivered"})
        assert forwarder.stop() == 0
        worker = shop.worker(forward="no")
        shop.until_run([*before, *leased, *acked, *waiting])
        assert {shop.counts[one] for one in (*before, *acked, *waiting)} == {1}
        # Tasks are put onto the broker one by one: one was under way when it was killed.
        assert sum(shop.counts[one] for one in leased) <= len(leased) + 1
        assert worker.stop() == 0
    finally:
        store.kill()


# ── tokens, shards, forks ──────────────────────────────────────────────────────────────────────


def test_with_tokens_shards_and_processes_that_are_forked(make_shop, make_api, store):
    api = make_api(shards=2)
    token = make_token(api.data_dir, "celery", "publish:celery.*", "consume:celery.*")
    api.start()
    shop = make_shop(api.process.url, store.url(2), store.url(3), token=token)
    worker = shop.worker("-c", "2", pool="prefork")
    worker.until_told("ready.")
    # From one side of a fork, and from the other.
    ids = shop.send(20)
    started = shop.app.tasks["start"].delay().id
    shop.until_run([*ids, f"{started}-child"])
    assert set(shop.counts.values()) == {1}
    assert str(worker.pid) not in {run[-2] for run in shop.runs}
    assert worker.stop() == 0


# ── as the document has it ─────────────────────────────────────────────────────────────────────


def test_the_program_of_the_document(shared_api, store, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    program = program.replace("http://127.0.0.1:8080", shared_api.process.url)
    (tmp_path / "shop.py").write_text(program.replace("redis://127.0.0.1:6379/0", store.url(9)))
    command = [sys.executable, "-c", "import shop; shop.place(1001)"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=30)
    listed = shared_api.ask("GET", "/v1/subjects/celery.tasks/messages")["messages"]
    (task,) = [one["body"]["headers"] for one in listed]
    assert (task["task"], task["argsrepr"]) == ("shop.close_if_unpaid", "(1001,)")
    left = datetime.fromisoformat(task["eta"]) - datetime.now(UTC)
    assert timedelta(minutes=29) < left <= timedelta(minutes=30)


# ── the command ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--help"], 0, "example: python -m delayserver.integrations.celery -A shop.celery"),
        (["-A", "nowhere"], 1, "error: no app of Celery at 'nowhere'"),
        (["-A", "plain"], 1, "error: the app 'plain' at 'plain' has no DelayedTasks"),
    ],
)
def test_the_command_says_what_it_is_and_what_is_wrong(tmp_path, arguments, status, told):
    (tmp_path / "plain.py").write_text("from celery import Celery\napp = Celery('plain')\n")
    command = [sys.executable, "-m", "delayserver.integrations.celery", *arguments]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run(command, check=False, **options)
    assert (done.returncode, done.stderr.count("Traceback")) == (status, 0)
    assert told in done.stdout + done.stderr
