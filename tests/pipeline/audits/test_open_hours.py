"""Hours that are over and open: what keeps them open is named."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from delayserver.pipeline.audits import telling
from delayserver.pipeline.audits.audit import Audit, audit_here
from delayserver.pipeline.reports import audit_report
from storage.frame import Rows
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.store import FAILED, Store
from tests.world.resealing import rewrite


def audited(store: Store) -> Audit:
    store.checkpoint()
    store.stop()
    return audit_here(store.root, now_ms=store.clock.now_ms)


def test_one_message_that_nobody_wants_keeps_an_hour_open(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("mail", "order.*")
    store.publish("order.a", [1000, 2000])
    (seq, _) = store.publish("lonely", [3000, 4000])
    store.publish("lonely", [2 * HOUR_MS])
    store.run(HOUR_MS + 1)
    ids = store.server.engine.ids
    found = audited(store)
    assert found.is_clean
    (one,) = found.open_hours
    assert (one.subject, one.subscription, one.count, one.seq) == ("lonely", None, 2, seq)
    assert one.is_unmatched
    assert one.message_id is not None and ids.decode(one.message_id).seq == seq
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(*telling.lines(found), sep="\n")
    assert isinstance(console.file, io.StringIO)
    said = (
        f"open: {one.hour} is kept open by 2 of lonely (no subscription matches), first message "
        f"{one.message_id}"
    )
    assert said in console.file.getvalue()
    (document,) = telling.document(found)["open_hours"]
    assert (document["hour"], document["count"]) == (one.hour, 2)
    assert "Hours that are over and open" in audit_report.page(found)


def test_so_does_one_that_its_subscriber_does_not_take(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("pull", "a", type="pull")
    store.subscribe("mail", "a", backoff_ms=(2 * HOUR_MS,))
    store.publish("a", [1000])
    store.run(HOUR_MS + 1, lambda subject: FAILED)
    (one,) = audited(store).open_hours
    # The other one tries again in another hour.
    assert (one.subject, one.subscription, one.count) == ("a", "pull", 1)
    assert not one.is_unmatched


def test_what_is_settled_or_not_over_is_none_of_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("mail", "a")
    store.publish("a", [1000])
    store.publish("b", [HOUR_MS + 1000])
    store.run(HOUR_MS + 2000)
    assert audited(store).open_hours == []


@pytest.mark.damaged("a due time that no calendar has")
@pytest.mark.parametrize("due_ms", [-HOUR_MS, 0, 1 << 50, 1 << 62])
def test_what_is_due_at_no_time_ends_no_audit(tmp_path: Path, due_ms: int) -> None:
    store = Store(tmp_path / "data")
    store.publish("lonely", [1000])
    store.run(HOUR_MS + 1)
    store.checkpoint()
    store.stop()

    def never(rows: Rows) -> Rows:
        rows["due_ms"] = due_ms
        return rows

    assert rewrite(store.path(LogKind.SCHEDULE), never)
    found = audit_here(store.root, now_ms=store.clock.now_ms)
    assert found.violations["damaged"] == 1
    assert found.open_hours == []
