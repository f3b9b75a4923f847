"""/docs: the OpenAPI document for people, with all that the page needs, so that it works offline.

The page and the document are for everybody, also where tokens are asked for: a browser sends no
token when it opens a page, and both are made from this project's sources. The calls that the
page makes need the token that "Authorize" on it takes.

Cost: a file is read for each request. Threads: belongs to the event loop.
"""

import gzip
from importlib.resources import files
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from delayserver.api.finish import accepts_gzip
from delayserver.api.scopes import DOCS_PATH

_ASSETS: Final = files("delayserver.api.rest") / "swagger_ui"
_MEDIA_TYPES: Final = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
}
_NO_ICON: Final = "data:,"

router = APIRouter(include_in_schema=False)


@router.get(DOCS_PATH)
async def get_docs() -> Response:
    """The page. Its addresses are relative: a gateway may put a prefix before them."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Delay server",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url=_NO_ICON,
        swagger_ui_parameters={"validatorUrl": None},  # it would be asked on another host
    )


@router.get(DOCS_PATH + "/{name}")
async def get_asset(
    name: Literal["swagger-ui.css", "swagger-ui-bundle.js"], request: Request
) -> Response:
    """A file of the page."""
    data = (_ASSETS / f"{name}.gz").read_bytes()
    headers = {"cache-control": "max-age=86400", "vary": "accept-encoding"}
    if accepts_gzip(request.scope["headers"]):
        headers["content-encoding"] = "gzip"
    else:
        data = gzip.decompress(data)
    return Response(data, headers=headers, media_type=_MEDIA_TYPES[name])
