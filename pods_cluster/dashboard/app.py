"""The application: reading routes, the stream, the controls, the page."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

from pods_cluster import __version__
from pods_cluster.client.controls import ControlFailed, Controls, LiveStatus, NotLive
from pods_cluster.dashboard import api, control_schemas, guide, responses, schemas
from pods_cluster.dashboard.access_token import COOKIE, Token
from pods_cluster.dashboard.assets import Asset, Assets
from pods_cluster.dashboard.guard import Guard, address_of, is_local, session_cookie
from pods_cluster.dashboard.hub import Hub, TooManyListeners
from pods_cluster.dashboard.prometheus import exposition
from pods_cluster.dashboard.rate_limit import RateLimit
from pods_cluster.dashboard.run_view import Change, RunView
from pods_cluster.dashboard.watcher import RunWatcher

REQUESTS_A_SECOND = 200.0
REQUESTS_AT_ONCE = 1_000.0
GUESSES = 10
"""Wrong tokens that one address may give at once; then one every `GUESS_SECONDS`."""
GUESS_SECONDS = 6.0

_CONTROL: dict[int | str, dict[str, Any]] = {
    **api.REFUSED,
    400: {"model": schemas.Problem, "description": "The body is no text."},
    403: {"model": schemas.Problem, "description": "The request comes from another site's page."},
    409: {"model": schemas.Problem, "description": "The run is not live."},
    413: {"model": schemas.Problem, "description": "The body is too long."},
    502: {"model": schemas.Problem, "description": "The live run did not do what was asked."},
    503: {"model": schemas.Problem, "description": "This dashboard reaches no live runs."},
}
controls_router = APIRouter(prefix="/api", tags=["controls"], responses=_CONTROL)
page_router = APIRouter()


def create_app(
    paths: Sequence[str | Path],
    *,
    token: Token,
    controls: Controls | None = None,
    rate: RateLimit | None = None,
) -> FastAPI:
    """The dashboard on folders of runs. Raises RunFolderError if there is no such folder."""
    hub = Hub()

    def tell(view: RunView, change: Change) -> None:
        if len(hub):
            hub.tell("update", view.id, {"rows": change.rows, "after": change.after, "events": change.events,
                                         "new_samples": change.samples, "reset": change.reset,
                                         "live": responses.live(view)})  # fmt: skip

    runs = RunWatcher(paths, tell)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hub.attach()
        runs.start()
        yield
        hub.close()
        await run_in_threadpool(runs.close)

    app = FastAPI(
        title="pods dashboard",
        version=__version__,
        description="Runs as their folders tell of them. Reading is open on this machine; from elsewhere, and for "
        "every change, give the token of the file that `pods dashboard` names.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # the usual documentation pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.runs, app.state.hub, app.state.token, app.state.controls = runs, hub, token, controls
    app.state.assets = Assets()
    app.state.guesses = RateLimit(1 / GUESS_SECONDS, GUESSES)
    for router in (api.router, controls_router, page_router):
        app.include_router(router)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    app.add_middleware(
        Guard, token=token, rate=rate or RateLimit(REQUESTS_A_SECOND, REQUESTS_AT_ONCE), guesses=app.state.guesses
    )

    @app.exception_handler(RequestValidationError)
    async def _refused(_: Request, error: RequestValidationError) -> Response:
        # What was sent is not sent back: it may be a token, or (NaN, bytes, half of a character) nothing that JSON can say.
        detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()]
        return Response(json.dumps({"detail": detail}), 422, media_type="application/json")

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"the dashboard failed: {type(error).__name__}"}, 500)

    return app


@page_router.get("/healthz", tags=["server"])
def healthz(request: Request) -> schemas.Health:
    """Whether the server answers."""
    return schemas.Health(version=__version__, runs=len(request.app.state.runs), listeners=len(request.app.state.hub))


@page_router.get("/metrics", tags=["server"], responses={**api.REFUSED, 200: {"content": {"text/plain": {}}}})
def prometheus(request: Request) -> Response:
    """Newest values of running runs for Prometheus."""
    text = exposition(request.app.state.runs, time.time())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@page_router.get(
    "/api/stream",
    tags=["runs"],
    response_class=StreamingResponse,
    responses={
        **api.REFUSED,
        200: {"content": {"text/event-stream": {}}, "description": "`update` messages: new steps and events of a run."},
        404: {"model": schemas.Problem, "description": "There is no such run."},
        503: {"model": schemas.Problem, "description": "Too many pages listen."},
    },
)
async def stream(
    request: Request,
    run: Annotated[list[str], Query(min_length=1, max_length=20, description="Runs to hear of.")],
) -> Response:
    """Server-sent events: what the runs write, within a second."""
    runs: RunWatcher = request.app.state.runs
    hub: Hub = request.app.state.hub
    for name in run:
        await run_in_threadpool(api.view_of, request, name)
    try:
        listener = hub.join(frozenset(run), address_of(request.scope))
    except TooManyListeners as error:
        raise HTTPException(503, str(error)) from None

    def touch() -> None:
        for name in run:
            runs.touch(name)

    return _EventStream(hub.stream(listener, touch))


class _EventStream(StreamingResponse):
    """Server-sent events. Closes its generator however the response ends, so that the listener's place is free at once."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache, no-transform"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


@controls_router.post("/login", status_code=204, response_class=Response)
def login(request: Request, body: control_schemas.Login) -> Response:
    """Give the token once; a cookie that this page alone can use stands for it then."""
    address = address_of(request.scope)
    token: Token = request.app.state.token
    guesses: RateLimit = request.app.state.guesses
    wait = guesses.empty(address)
    if wait:
        raise HTTPException(429, "too many wrong tokens", {"retry-after": str(int(wait) + 1)})
    if not token.matches(body.token.strip()):
        guesses.take(address)
        raise HTTPException(401, "this is not the token", {"www-authenticate": "Bearer"})
    response = Response(status_code=204)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, token.session, max_age=30 * 86400, httponly=True, samesite="strict", secure=secure)
    return response


@controls_router.get("/session")
def session(request: Request) -> control_schemas.Session:
    """The rights of this client."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    cookie = session_cookie(headers.get("cookie", ""))
    _, _, bearer = headers.get("authorization", "").partition(" ")
    token: Token = request.app.state.token
    return control_schemas.Session(
        local=is_local(request.scope, headers),
        signed_in=bool((cookie and token.opens(cookie)) or (bearer and token.matches(bearer.strip()))),
        controls=request.app.state.controls is not None,
    )


@controls_router.get("/runs/{run}/live", responses=api.NO_RUN)
async def live_status(request: Request, run: api.RunId) -> LiveStatus:
    """The live status of a run and its workers, as the run writes it."""
    view = await run_in_threadpool(api.view_of, request, run)
    return await _reach(request, lambda controls: controls.status(view.folder.name))


@controls_router.post("/runs/{run}/scale", responses=api.NO_RUN)
async def scale(request: Request, run: api.RunId, body: control_schemas.ScaleRequest) -> control_schemas.Accepted:
    """Change the sizes of a live run's pools."""
    view = await run_in_threadpool(api.view_of, request, run)
    return control_schemas.Accepted(
        detail=await _reach(request, lambda controls: controls.scale(view.folder.name, body.generators, body.learners))
    )


@controls_router.post("/runs/{run}/stop", responses=api.NO_RUN)
async def stop(request: Request, run: api.RunId, body: control_schemas.StopRequest) -> control_schemas.Accepted:
    """End a live run after what it is doing, its state saved."""
    view = await run_in_threadpool(api.view_of, request, run)
    return control_schemas.Accepted(
        detail=await _reach(request, lambda controls: controls.stop(view.folder.name, body.reason))
    )


async def _reach(request: Request, call: Any) -> Any:
    controls: Controls | None = request.app.state.controls
    if controls is None:
        raise HTTPException(503, "this dashboard only reads: it was started without access to a cluster")
    try:
        return await call(controls)
    except NotLive as error:
        raise HTTPException(409, str(error)) from None
    except ControlFailed as error:
        raise HTTPException(502, str(error)) from None


@page_router.get("/", include_in_schema=False)
def page(request: Request) -> Response:
    return _send(request, request.app.state.assets.page())


@page_router.get(guide.PATH, include_in_schema=False)
def troubleshooting() -> HTMLResponse:
    try:
        return HTMLResponse(guide.page(), headers={"cache-control": "no-cache"})
    except FileNotFoundError:  # a copy of the sources without docs/
        raise HTTPException(
            404, "this installation has no guide; it is docs/troubleshooting.md of the repository"
        ) from None


@page_router.get("/favicon.svg", include_in_schema=False)
def favicon(request: Request) -> Response:
    return _send(request, request.app.state.assets.get("favicon.svg"))


@page_router.get("/static/{name}", include_in_schema=False)
def static(request: Request, name: str) -> Response:
    return _send(request, request.app.state.assets.get(name))


def _send(request: Request, asset: Asset | None) -> Response:
    if asset is None:
        raise HTTPException(404, "there is no such file")
    headers = {"etag": asset.etag, "cache-control": asset.cache, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.packed, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)
