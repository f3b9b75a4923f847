"""The console in a real browser: what an operator does, and what is seen of it.

Messages are published by the API; all else is done with the buttons. `DELAYSERVER_PICTURES=1`
writes the pictures of docs/console.md anew."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Page, Request, Route, expect
from playwright.sync_api import TimeoutError as PageTimeout

from delayserver.security.tokens import TokenFile
from storage.files import OsFiles
from tests.integration.api_support import unique
from tests.waiting import wait_until

PICTURES = Path(__file__).parents[2] / "docs" / "images"
COLOURS = 256
VIEWS = (
    "",
    "messages",
    "subjects",
    "subscriptions",
    "dead-letters",
    "schedules",
    "heartbeats",
    "sources",
    "cluster",
    "bulk",
    "tokens",
)
NARROW = {"width": 360, "height": 740}
BAD = ("serious", "critical")
ONCE = {"max_attempts": 1}
SLOWEST_MS = 30_000
"""No page asks less often, whatever it asks for."""


def button(page: Page, name: str, *, exact: bool = True):
    return page.get_by_role("button", name=name, exact=exact)


def confirm(page: Page, name: str) -> None:
    """Say yes to what a dialog asks."""
    page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()


def title(page: Page, text: str) -> None:
    expect(page.get_by_role("heading", level=1, name=text, exact=True)).to_be_visible()


def fact(page: Page, name: str):
    """What stands under a name."""
    return page.locator(".facts div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def find(page: Page, text: str) -> None:
    """Find a message by the keyboard."""
    page.keyboard.press("/")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def state(page: Page) -> str | None:
    """The state beside the title."""
    return page.locator(".head .badge").text_content()


def badge(page: Page, text: str) -> None:
    """The state beside the title."""
    expect(page.locator(".head .badge")).to_have_text(text)


def shows_later(page: Page, probe: Callable[[], bool]) -> None:
    """Wait until it is so; what the page asks for from time to time it asks for at once."""
    # A call that waits for its answer meanwhile would be taken for one that has none, and after
    # such an error the page asks less often.
    waiting: set[Request] = set()

    def asked(request: Request) -> None:
        waiting.add(request)

    def answered(request: Request) -> None:
        waiting.discard(request)

    def is_so() -> bool:
        if not waiting:
            page.clock.fast_forward(SLOWEST_MS)
        return probe()

    page.on("request", asked)
    page.on("requestfinished", answered)
    page.on("requestfailed", answered)
    wait_until(is_so)
    page.remove_listener("request", asked)
    page.remove_listener("requestfinished", answered)
    page.remove_listener("requestfailed", answered)


def findings(page: Page, rules: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What axe finds that is serious, by all rules or by these."""
    options = {"resultTypes": ["violations"]} | ({"runOnly": [*rules]} if rules else {})
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate(Axe().axe_script)
    found = page.evaluate("options => axe.run(options).then(found => found.violations)", options)
    return [one for one in found if one["impact"] in BAD]


def test_log_in_and_out(open_console, server):
    """The form is for everybody, too."""
    page = open_console(token=None)
    field = page.get_by_label("Token")
    expect(field).to_be_focused()
    assert findings(page) == []
    field.fill("guess")
    button(page, "Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("the token is not valid")
    field.fill(server.tokens["operator"])
    button(page, "Log in").click()
    title(page, "Overview")
    page.reload()
    title(page, "Overview")
    button(page, "Log out").click()
    expect(field).to_be_visible()
    page.reload()
    expect(field).to_be_visible()


def test_a_message_is_found_fired_and_replayed(open_console, server, receiver):
    subject = unique("fired")
    url = receiver.hook(200)
    server.subscribe(subject, subject, url=url)
    published = server.publish(subject, key="k/1", delay="1h", body={"order": 10**20})
    page = open_console(has_clock=True)
    title(page, "Overview")
    find(page, f"{subject}/k/1")
    badge(page, "scheduled")
    # A number that no float holds is shown as it was published.
    expect(page.get_by_role("region", name="Body")).to_contain_text(str(10**20))
    button(page, "Fire now").click()
    shows_later(page, lambda: state(page) == "delivered")
    timeline = page.locator(".timeline li")
    # It is asked for by a call of its own, maybe before the answer of the receiver was recorded.
    shows_later(page, lambda: timeline.count() == 1)
    expect(timeline).to_contain_text(["Delivered with status 200"])
    assert receiver.next(url).headers["webhook-id"] == published["id"]
    button(page, "Replay").click()
    assert receiver.next(url).headers["delay-replay"] == "1"
    expect(page.get_by_role("status").filter(has_text="Delivered again")).to_be_visible()


def test_who_knows_no_command_line_mends_what_did_not_arrive(open_console, server, receiver):
    """Found by its key, the reason read, the subscription changed, and redriven: all by buttons."""
    subject = unique("unpaid")
    wrong, right = receiver.hook((404, {}, "no such shop")), receiver.hook(200)
    secret, own = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", {"x-shop": "7"}
    retry = {**ONCE, "backoff": ["7s", "1m"]}
    server.subscribe(subject, subject, url=wrong, retry=retry, secret=secret, headers=own)
    published = server.publish(subject, key="1001", body={"order": 1001})
    wait_until(lambda: server.look_up(published["id"])["state"] == "dead")
    before = server.ask("GET", f"/v1/subscriptions/{subject}")
    page = open_console(has_clock=True)
    title(page, "Overview")
    find(page, f"{subject}/1001")
    badge(page, "dead")
    expect(page.locator(".timeline li")).to_contain_text(["no such shop"])
    page.get_by_role("link", name=subject).first.click()
    expect(fact(page, "Goes to")).to_have_text(wrong)
    button(page, "Change…").click()
    page.get_by_label("Goes to").fill(right)
    page.get_by_label("Secret").fill(secret)
    page.get_by_label("Header x-shop").fill("8")
    picture(page, "change", server)
    confirm(page, "Change it")
    expect(fact(page, "Goes to")).to_have_text(right)
    # All that was not touched is as it was.
    after = server.ask("GET", f"/v1/subscriptions/{subject}")
    assert after == before | {"url": right, "failing_since": after["failing_since"]}
    page.go_back()
    button(page, "Redrive").click()
    arrived = receiver.next(right)
    assert arrived.headers["x-shop"] == "8" and "webhook-signature" in arrived.headers
    shows_later(page, lambda: state(page) == "delivered")


def test_messages_are_listed_moved_and_cancelled(open_console, server):
    subject = unique("listed")
    ids = [server.publish(subject, delay=f"{n + 1}h")["id"] for n in range(60)]
    page = open_console("messages", has_clock=True)
    page.get_by_role("combobox", name="Subject", exact=True).fill(subject)
    button(page, "Find").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(50)
    button(page, "Next").click()
    expect(rows).to_have_count(10)
    for number in (50, 51):
        page.get_by_label(f"Select {ids[number]}").check()
    button(page, "Cancel selected (2)").click()
    confirm(page, "Cancel them")
    shows_later(page, lambda: rows.count() == 8)
    assert server.look_up(ids[51])["state"] == "cancelled"
    rows.first.get_by_role("link").click()
    badge(page, "scheduled")
    button(page, "Move…").click()
    page.get_by_label("New due time").fill("3 days")
    confirm(page, "Move")
    # What the server refuses is told in its words.
    expect(page.locator(".notice.bad").filter(has_text="duration")).to_be_visible()
    button(page, "Move…").click()
    page.get_by_label("New due time").fill("3d")
    confirm(page, "Move")
    expect(page.get_by_text("in 2 d 23 h").first).to_be_visible()
    button(page, "Cancel…").click()
    confirm(page, "Leave it")
    badge(page, "scheduled")
    button(page, "Cancel…").click()
    confirm(page, "Cancel it")
    badge(page, "cancelled")
    expect(button(page, "Move…")).to_have_count(0)


def test_dead_letters_are_redriven_one_some_and_all(open_console, server, receiver):
    subject = unique("dead")
    url = receiver.hook(*[500] * 9, 200)
    server.subscribe(subject, subject, url=url, retry=ONCE)
    ids = [server.publish(subject, key=str(n))["id"] for n in range(6)]
    letters = f"/v1/subscriptions/{subject}/dead-letters"
    wait_until(lambda: len(server.ask("GET", letters)["dead_letters"]) == 6)
    page = open_console()
    expect(page.get_by_text("Receiver down").first).to_be_visible()
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Dead letters").click()
    page.get_by_role("link", name=subject).click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(rows.first).to_contain_text("HTTP 500")
    button(page, f"Redrive {ids[0]}").click()
    expect(page.get_by_text("1 will be delivered again")).to_be_visible()
    for one in ids[1:3]:
        page.get_by_label(f"Select {one}").check()
    button(page, "Redrive selected (2)").click()
    expect(page.get_by_text("2 will be delivered again")).to_be_visible()
    # All three are refused once more; from now on they are taken.
    wait_until(lambda: receiver.count(url) == 9)
    wait_until(lambda: len(server.ask("GET", letters)["dead_letters"]) == 6)
    page.reload()
    button(page, "Redrive all…").click()
    confirm(page, "Redrive all")
    expect(page.get_by_text("6 will be delivered again")).to_be_visible()
    expect(page.get_by_text("None.", exact=True)).to_be_visible()
    wait_until(lambda: all(server.look_up(one)["state"] == "delivered" for one in ids))


def test_each_is_redriven_once_by_all_while_the_receiver_is_down(open_console, server, receiver):
    """Page after page, each of which is asked for when what was redriven has died again."""
    subject, count = unique("down"), 7
    url = receiver.hook(500)
    server.subscribe(subject, subject, url=url, retry=ONCE)
    server.ask("POST", "/v1/messages/batch", json=[{"subject": subject}] * count)
    letters = f"/v1/subscriptions/{subject}/dead-letters"

    def all_are_dead() -> bool:
        return len(server.ask("GET", letters)["dead_letters"]) == count

    def pass_on(route: Route) -> None:
        wait_until(all_are_dead)
        route.continue_(url=route.request.url.replace("limit=200", "limit=2"))

    page = open_console(f"dead-letters/{subject}")
    page.route("**/dead-letters?limit=200*", pass_on)
    expect(page.locator("tbody tr")).to_have_count(count)
    button(page, "Redrive all…").click()
    confirm(page, "Redrive all")
    expect(page.get_by_text(f"{count} will be delivered again")).to_be_visible()
    wait_until(all_are_dead)
    assert receiver.count(url) == 2 * count


def test_a_subscription_is_paused_resumed_and_deleted(open_console, server):
    name = unique("stopped")
    server.subscribe(name, name)
    page = open_console("subscriptions", has_clock=True)
    page.get_by_label("Beginning of a name").fill(name)
    page.keyboard.press("Enter")
    button(page, f"Pause {name}").click()
    expect(page.get_by_role("cell", name="paused")).to_be_visible()
    assert server.ask("GET", f"/v1/subscriptions/{name}")["paused"]
    page.get_by_role("link", name=name, exact=True).click()
    button(page, f"Resume {name}").click()
    badge(page, "active")
    server.publish(name)
    shows_later(page, lambda: fact(page, "Waiting").text_content() == "1")
    button(page, "Delete…").click()
    confirm(page, "Delete it")
    title(page, "Subscriptions")
    server.ask("GET", f"/v1/subscriptions/{name}", 404)


def test_a_schedule_is_triggered_and_paused(open_console, server):
    name = unique("nightly")
    definition = {"subject": name, "cron": "0 3 * * *", "body": {"shop": 7}}
    server.ask("PUT", f"/v1/schedules/{name}", 201, json=definition)
    page = open_console("schedules")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator("main ol li")).to_have_count(5)
    button(page, "Trigger").click()
    expect(fact(page, "Runs")).to_have_text("1")
    button(page, f"Pause {name}").click()
    badge(page, "paused")
    assert server.ask("GET", f"/v1/schedules/{name}")["paused"]


def test_a_heartbeat_is_found_and_ended(open_console, server):
    key = unique("worker/7?")
    document = {"timeout": "1h", "subject": "worker.lost"}
    path = "/v1/heartbeats/" + key.replace("?", "%3F")
    server.ask("PUT", path, 201, json=document)
    page = open_console("heartbeats")
    page.get_by_role("textbox", name="Key", exact=True).fill(key)
    button(page, "Find").click()
    button(page, "End…").click()
    confirm(page, "End it")
    expect(page.get_by_role("alert")).to_be_visible()
    server.ask("GET", path, 404)


def test_what_a_token_may_not_do_is_not_shown(open_console, server):
    subject = unique("seen")
    server.subscribe(subject, subject)
    published = server.publish(subject, delay="1h")
    page = open_console(f"messages/{published['id']}", token="consumer")
    badge(page, "scheduled")
    for name in ("Fire now", "Move…", "Cancel…"):
        expect(button(page, name)).to_have_count(0)
    views = page.get_by_role("navigation", name="Views")
    expect(views.get_by_role("link", name="Subscriptions")).to_be_visible()
    expect(views.get_by_role("link", name="Bulk")).to_have_count(0)
    page.goto("/console#/subscriptions")
    expect(button(page, f"Pause {subject}")).to_be_visible()
    page.goto("/console#/bulk")
    title(page, "Nothing here")


def test_keys(open_console):
    page = open_console()
    title(page, "Overview")
    page.keyboard.press("g")
    page.keyboard.press("s")
    title(page, "Subscriptions")
    # Who hears the page is told where it is.
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("find a message")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_restart_is_seen_and_got_over(open_console, server):
    page = open_console(has_clock=True)
    pulse = page.locator(".pulse")
    expect(pulse).to_have_text("Live")
    server.process.kill()
    shows_later(page, lambda: pulse.text_content() == "Not reached")
    server.start()
    shows_later(page, lambda: pulse.text_content() == "Live")
    page.reload()
    title(page, "Overview")


def test_who_is_not_let_in_any_more_logs_in_again(open_console, server):
    page = open_console("tokens", token="leaving", has_clock=True)
    title(page, "Tokens")
    expect(page.get_by_role("cell", name="consumer")).to_be_visible()
    TokenFile(OsFiles(str(server.data_dir))).revoke("leaving")
    shows_later(page, page.get_by_role("alert").is_visible)
    expect(page.get_by_role("alert")).to_contain_text("Please log in again")
    page.get_by_label("Token").fill(server.tokens["operator"])
    button(page, "Log in").click()
    title(page, "Tokens")


# ── how it looks, and to whom ────────────────────────────────────────────────────────────────────


def picture(page: Page, name: str, server) -> None:
    """A picture for the documents, if they are wanted: charts need a minute of traffic."""
    if os.environ.get("DELAYSERVER_PICTURES"):
        for n in range(600 if name.startswith("overview") else 0):
            burst = [{"subject": "parcel.sent"}] * (20 + 12 * (n // 100 % 2) + n % 7)
            server.ask("POST", "/v1/messages/batch", json=burst)
            page.wait_for_timeout(100)
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
        image.save(PICTURES / f"console-{name}.png", optimize=True)


@pytest.fixture(scope="module")
def filled(server, receiver):
    """Something in every view: views to look at one thing each."""
    url = receiver.hook((500, {}, "no stock"))
    server.subscribe("billing", "order.unpaid", url=url, retry=ONCE)
    server.subscribe("refunds", "envelope.*")
    server.subscribe("shipping", "parcel.*", url=receiver.hook(200))
    server.subscribe("sms-gateway", "sms", url=receiver.hook(200))
    server.ask("POST", "/v1/subscriptions/sms-gateway/pause")
    for name, when in (("report-daily", {"cron": "0 9 * * MON-FRI"}), ("cleanup", {"every": "1h"})):
        definition = {"subject": name, "body": {"shop": 7}, "timezone": "Europe/Berlin"} | when
        server.ask("PUT", f"/v1/schedules/{name}", 201, json={**definition})
    server.ask("PUT", "/v1/heartbeats/worker-7", 201, json={"timeout": "1h", "subject": "lost"})
    subjects = ("order.unpaid", "envelope.refund", "trial.ends")
    batch = [
        {
            "subject": subjects[n % 3],
            "key": str(1000 + n),
            "body": {"order": 1000 + n, "total": 5 + n * 7 % 495},
            "headers": {"x-shop": "7"},
            "delay": f"{10 + (n * 7919 % 2500) * (n * 104_729 % 2500) // 2900}m",
        }
        for n in range(900)
    ]
    ids = server.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    dead = [server.publish("order.unpaid", key=str(n), body={"order": n})["id"] for n in range(4)]
    server.publish("nobody.listens")
    letters = "/v1/subscriptions/billing/dead-letters"
    wait_until(lambda: len(server.ask("GET", letters)["dead_letters"]) == 4)
    return [
        *VIEWS,
        "messages?subject=order.unpaid",
        f"messages/{ids[0]}",
        f"messages/{dead[0]}",
        "subscriptions/billing",
        "dead-letters/billing",
        "schedules/report-daily",
        "heartbeats/worker-7",
    ]


FITS = "width => document.documentElement.scrollWidth <= width"


@pytest.mark.timeout(300)  # where pictures are made
def test_every_view_is_for_everybody(open_console, server, filled):
    """No finding of axe that is serious, and nothing that a narrow screen cuts off. Of the colours
    alone there are two sets."""
    page = open_console()
    # A dead message, which shows most.
    pictures = {
        ("", "light"): "overview",
        ("", "dark"): "overview-dark",
        (filled[-5], "light"): "message",
    }
    found = []
    for view in filled:
        page.set_viewport_size({"width": 1280, "height": 820})
        page.goto(f"/console#/{view}")
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("main").get_by_text("Loading…")).to_have_count(0)
        for scheme, rules in (("light", ()), ("dark", ("color-contrast",))):
            # No colour is on its way from one to the other.
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            if (view, scheme) in pictures:
                picture(page, pictures[view, scheme], server)
            for one in findings(page, rules):
                where = [node["html"] for node in one["nodes"]][:3]
                found.append((scheme, view, one["id"], where))
        page.set_viewport_size(NARROW)
        try:  # charts follow the width in the next frame
            page.wait_for_function(FITS, arg=NARROW["width"], timeout=2000)
        except PageTimeout:
            found.append(("both", view, "wider than the screen", []))
    assert not found, "\n".join(map(str, found))
