"""The page of the OpenAPI document: its files, in the form that the client takes."""

import gzip
from collections.abc import Iterator
from importlib.resources import files

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from delayserver.api.rest import docs_page

NAME = "swagger-ui.css"


@pytest.fixture(scope="module")
def browser() -> Iterator[TestClient]:
    application = FastAPI()
    application.include_router(docs_page.router)
    with TestClient(application) as client:
        yield client


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("gzip", "gzip"), ("*", "gzip"), ("identity", None), ("br, gzip;q=0", None)],
)
def test_who_takes_gzip_gets_it(browser: TestClient, accept: str, encoding: str | None) -> None:
    answer = browser.get(f"/docs/{NAME}", headers={"accept-encoding": accept})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.headers["vary"] == "accept-encoding"
    packed = (files("delayserver.api.rest") / "swagger_ui" / f"{NAME}.gz").read_bytes()
    assert answer.content == gzip.decompress(packed)


def test_nothing_else_is_served(browser: TestClient) -> None:
    assert browser.get("/docs/swagger-ui.css.gz").status_code == 422
