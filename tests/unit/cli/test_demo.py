"""How the demo tells what happened."""

import json

import pytest
from rich.console import Console

from delayserver.cli.demo import _document, _rendered
from delayserver.cli.demo.ledger import judge
from delayserver.cli.demo.servers import OwnServer
from delayserver.cli.demo.shop import REFUND, SHOP, UNPAID, WALLET, DemoPlan, DemoShop
from tests.unit.client.fake_server import LOST, FakeTransport, answer, asynchronous, problem


def make_shop(tmp_path):
    shop = DemoShop(DemoPlan(seed=7), OwnServer(tmp_path, 1))
    for subject, subscription in ((UNPAID, SHOP), (UNPAID, SHOP), (REFUND, WALLET)):
        order = shop.ledger.order(subject, (subscription,))
        order.publish_asked(1010, 1000)
        order.publish_answered(f"id-{order.number}", 1010, 1001)
    _, cancelled, refund = shop.ledger.orders
    cancelled.cancelled_ms = 1005
    refund.received(WALLET, "id-2", 1014, settled=True)
    return shop


def shown(shop, directory=None):
    console = Console(width=120)
    with console.capture() as capture:
        for part in _rendered(shop, judge(shop.ledger), directory):
            console.print(part)
    return capture.get()


def test_the_table_names_what_is_lost(tmp_path):
    text = shown(make_shop(tmp_path), tmp_path)
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    counts = {name: [cell.strip() for cell in line.split("│")[2:5]] for name, line in lines.items()}
    assert counts["published"] == ["2", "1", "3"]
    assert counts["cancelled (paid, opened)"] == ["1", "0", "1"]
    assert counts["delivered"] == ["0", "1", "1"]
    assert counts["lost"] == ["1", "0", "1"]
    assert counts["late, p50 ²"] == ["–", "4 ms", "4 ms"]
    assert '"id-0"' in text
    assert "seed 7" in text
    assert str(tmp_path) in text


def test_the_document_names_what_is_lost(tmp_path):
    shop = make_shop(tmp_path)
    document = _document(shop, judge(shop.ledger), None)
    assert json.loads(json.dumps(document)) == document
    assert (document["published"], document["lost"], document["early"]) == (3, 1, 0)
    assert document["violations"] == [{"what": "lost", "ids": ["id-0"], "key": "0"}]


def test_the_ledger_is_written(tmp_path):
    make_shop(tmp_path).ledger.write(tmp_path / "ledger.jsonl")
    first, *orders = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert first == {"outages_ms": [], "kills_ms": []}
    assert [order["ids"] for order in orders] == [["id-0"], ["id-1"], ["id-2"]]
    assert orders[2]["received"][WALLET][0]["at_ms"] == 1014


@pytest.mark.parametrize(
    ("before", "expired", "is_settled", "is_recorded"),
    [
        ([], [], True, True),
        ([], ["a"], False, False),
        # The first attempt may have been recorded by whoever died before the answer was out.
        ([LOST], ["a"], True, False),
        ([problem(503)], ["a"], True, False),
        ([LOST, problem(503)], [], True, True),
    ],
)
@asynchronous
async def test_what_an_answer_says_of_an_ack(tmp_path, before, expired, is_settled, is_recorded):
    shop = make_shop(tmp_path)
    refund = shop.ledger.order(REFUND, (WALLET,))
    pulled = {"id": "id-3", "lease": "a", "body": refund.body}
    shop._client = FakeTransport(
        answer(200, {"messages": [pulled]}), *before, answer(200, {"expired": expired}), EOFError()
    )
    with pytest.raises(EOFError):
        await shop._pull()
    (receipt,) = refund.receipts[WALLET]
    assert refund.is_settled(WALLET) is is_settled
    assert receipt.is_recorded is is_recorded
