"""The console: what a browser is given, and what it is allowed to do with it."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import delayserver
from delayserver.api.rest import console

FOLDER = Path(delayserver.__file__).parent / "console"
FIRST_VIEW_MAX_BYTES = 300_000
NAMESPACE = "http://www.w3.org/2000/svg"
"""A name, which nobody asks for."""
SCRIPTS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.js"))


@pytest.fixture(scope="module")
def browser() -> Iterator[TestClient]:
    application = FastAPI()
    application.include_router(console.router)
    with TestClient(application) as client:
        yield client


def linked(page: str) -> list[str]:
    """What the page asks for."""
    return re.findall(r'(?:src|href)="([^"]+)"', page)


def imported(name: str) -> set[str]:
    """The files that a script imports, itself and theirs not."""
    text = (FOLDER / name).read_text()
    found = re.findall(r"""(?:from|import\()\s*['"](\.[^'"]+)['"]""", text)
    return {resolved(PurePosixPath(name).parent, one) for one in found}


def resolved(folder: PurePosixPath, path: str) -> str:
    parts: list[str] = []
    for part in (folder / path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def test_the_page_may_do_what_its_own_files_need_and_nothing_else(browser: TestClient) -> None:
    page = browser.get("/console")
    assert page.headers["content-type"].startswith("text/html")
    policy = dict(one.split(" ", 1) for one in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" == policy["frame-ancestors"] == policy["form-action"]
    for source in ("script-src", "style-src", "connect-src"):
        assert policy[source] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    # Nothing that the policy would refuse.
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", page.text)


def test_all_that_is_asked_for_is_there_and_of_this_origin(browser: TestClient) -> None:
    for link in linked(browser.get("/console").text):
        assert link.startswith("console/")  # a gateway may put a prefix before it
        assert browser.get("/" + link).status_code == 200, link
    for path in FOLDER.rglob("*"):
        if path.suffix in (".js", ".css", ".html", ".svg"):
            text = path.read_text().replace(NAMESPACE, "")
            if path.parent.name != "vendor":
                assert "http://" not in text and "https://" not in text, path


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_import_leads_to_a_file(browser: TestClient, name: str) -> None:
    answer = browser.get(f"/console/{name}")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.content == (FOLDER / name).read_bytes()
    for one in imported(name):
        assert (FOLDER / one).is_file(), one


def test_the_first_view_is_small(browser: TestClient) -> None:
    """What is sent until the overview stands: the page, what it links, and what those import."""
    names = {path.removeprefix("console/") for path in linked(browser.get("/console").text)}
    waiting = [name for name in names if name.endswith(".js")]
    while waiting:
        name = waiting.pop()
        lazy = {f"views/{path.name}" for path in (FOLDER / "views").iterdir()}
        found = imported(name) - names - (lazy if name == "app.js" else set())
        names |= found
        waiting += found
    assert "views/overview.js" in names and "vendor/preact.js" in names
    sent = sum(len(gzip.compress((FOLDER / name).read_bytes(), 9)) for name in names)
    assert 20_000 < sent < FIRST_VIEW_MAX_BYTES


def test_a_file_that_is_known_is_not_sent_again(browser: TestClient) -> None:
    packed = browser.get("/console/app.js")
    assert packed.headers["content-encoding"] == "gzip"
    plain = browser.get("/console/app.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == packed.content
    assert packed.headers["etag"] != plain.headers["etag"]
    again = browser.get("/console/app.js", headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == packed.headers["etag"]
    other = browser.get("/console/app.js", headers={"if-none-match": '"another"'})
    assert other.status_code == 200


def test_who_refuses_gzip_gets_none(browser: TestClient) -> None:
    answer = browser.get("/console/app.js", headers={"accept-encoding": "br, gzip;q=0"})
    assert "content-encoding" not in answer.headers
    assert answer.content == (FOLDER / "app.js").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "",
        "vendor",
        "vendor/README.md",  # not meant for browsers
        "../__init__.py",
        "..%2f__init__.py",
        "%2e%2e/config.py",
        "vendor/..%2f..%2f__init__.py",
        "%2fetc%2fpasswd",
        "app.js%00",
    ],
)
def test_nothing_else_is_served(browser: TestClient, path: str) -> None:
    assert browser.get(f"/console/{path}").status_code == 404


def test_what_others_wrote_is_as_it_was_fetched_and_has_its_licence() -> None:
    """`scripts/vendor` has written what it fetched, and the sums."""
    readme = (FOLDER / "vendor" / "README.md").read_text()
    sums = dict(reversed(line.split()) for line in re.findall(r"^[0-9a-f]{64}  \S+$", readme, re.M))
    code = {path.name for path in (FOLDER / "vendor").iterdir() if path.suffix in (".js", ".css")}
    assert sums.keys() == code
    for name, digest in sums.items():
        data = (FOLDER / "vendor" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name
    for licence in re.findall(r"\(`(\S+\.LICENSE)`\)", readme):
        assert (FOLDER / "vendor" / licence).stat().st_size > 500
