"""One server that asks for tokens, and one real browser, for all of this folder.

Whatever a page writes to the browser's console as an error, what its policy refuses, and a request
to any other origin fails the test that has it."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.integration.api_support import ApiServer, Receiver, make_token
from tests.sinks.programs import need

ARGUMENTS = (
    "--no-sandbox",  # tests run as root, too
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCOPES = {
    "operator": ["admin"],
    "consumer": ["consume:*"],
    "leaving": ["admin"],
}
TIMEOUT_MS = 20_000
REFUSED = "Failed to load resource"
"""What the browser says of each answer that is no success: a page may have to do with those."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("console")) as started:
        for name, scopes in SCOPES.items():
            started.tokens[name] = make_token(started.data_dir, name, *scopes)
        started.headers["authorization"] = f"Bearer {started.tokens['operator']}"
        started.start()
        yield started
        started.shut_down()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended with the file: as long as it is there, its event loop counts as the running one of this
    process, and no other can be."""
    program = need("chromium", "ensure_chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


Open = Callable[..., Page]


@pytest.fixture
def open_console(browser: Browser, server: ApiServer) -> Iterator[Open]:
    """Opens the console at a view, logged in with a token by its name (None: not), in a browser
    that knows nothing yet. `has_clock`: its time can be set forward (`page.clock`)."""
    contexts = []
    wrong: list[str] = []
    base = str(server.base_url).rstrip("/")

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED):
            wrong.append(f"{message.type}: {message.text}")

    def asked(url: str) -> None:
        if not url.startswith((f"{base}/", "data:")):
            wrong.append(f"a request to {url}")

    def open_at(view: str = "", token: str | None = "operator", *, has_clock: bool = False) -> Page:
        context = browser.new_context(base_url=base)
        contexts.append(context)
        if has_clock:
            context.clock.install()
        if token is not None:
            text = server.tokens[token]
            context.add_init_script(
                "if (!sessionStorage.getItem('known')) {"
                f" sessionStorage.setItem('delayserver.token', '{text}');"
                " sessionStorage.setItem('known', '1'); }"
            )
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked(request.url))
        page.goto(f"/console#/{view}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []
