"""Routes. Each turns a request into a call of `Service` and its answer into a response."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import anabranch
from anabranch.server.errors import ApiError, engine_error
from anabranch.server.fields import parse_body
from anabranch.server.generate import Delta, merge
from anabranch.server.guard import Guard, read_body
from anabranch.server.metrics import CONTENT_TYPE
from anabranch.server.schema import Ask, parse_chat, parse_completion
from anabranch.server.service import Job, Service
from anabranch.server.shapes import Body, ChatShape, CompletionShape, Shape, joined, usage
from anabranch.text.tokenizer import Json

_BODY_SECONDS = 60.0
_INLINE_BYTES = 1 << 16  # larger bodies are parsed in a thread
_CLIENT_GONE = 499  # never seen by anyone; the log's word for a hang-up


def create_app(service: Service) -> ASGIApp:
    """The ASGI application: guard outside, routes inside."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    routes = _Routes(service)
    for path, handler in (
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/server_info", routes.server_info),
        ("/metrics", routes.metrics),
    ):
        app.add_route(path, handler, ["GET"])
    app.add_route("/v1/completions", routes.completions, ["POST"])
    app.add_route("/v1/chat/completions", routes.chat, ["POST"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_any_error)
    guarded: ASGIApp = Guard(app, service.options.api_key, service.options.origins)
    if service.options.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.options.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return guarded


class _Routes:
    """The handlers; none of those before the last two waits on a generation."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        state = self._service.state
        ok = state in ("ready", "draining")
        return JSONResponse({"status": "ok" if ok else state}, 200 if ok else 503)

    async def ready(self, request: Request) -> Response:
        state, accepts = self._service.state, self._service.accepts
        status = "full" if state == "ready" and not accepts else state
        return JSONResponse({"status": status}, 200 if accepts else 503)

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._service.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._service.check_model(request.path_params["name"])))

    async def server_info(self, request: Request) -> Response:
        ready = self._service.ready
        info: Body = {"version": anabranch.__version__, "model": self._service.names[0]}
        if ready is not None:
            info |= json.loads(ready.info)
            info |= {"vocab_size": ready.vocab_size, "max_model_len": ready.max_model_len}
        return JSONResponse(info)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._service.stats_page(), media_type=CONTENT_TYPE)

    async def completions(self, request: Request) -> Response:
        return await _generate(self._service, request, parse_completion, CompletionShape)

    async def chat(self, request: Request) -> Response:
        return await _generate(self._service, request, parse_chat, ChatShape)

    def _model(self, name: str) -> Body:
        ready = self._service.ready
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "anabranch",
            "max_model_len": None if ready is None else ready.max_model_len,
        }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405, in the API's form."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    words = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    status = error.status_code
    code = "method_not_allowed" if status == 405 else "not_found"
    return _error_response(ApiError(status, words.get(status, error.detail), code=code))


async def _on_any_error(request: Request, error: Exception) -> Response:
    return _error_response(engine_error(f"{type(error).__name__}: {error}"))


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _generate(
    service: Service,
    request: Request,
    parse: Callable[[dict[str, Json]], Ask],
    shape_of: type[CompletionShape] | type[ChatShape],
) -> Response:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            data = await read_body(request.receive, service.options.max_body)
    except TimeoutError:
        raise ApiError(408, f"no whole body came in {_BODY_SECONDS:g} s", code="timeout") from None
    except ConnectionResetError:
        return Response(status_code=_CLIENT_GONE)
    if len(data) <= _INLINE_BYTES:
        ask = parse(parse_body(data))
    else:
        ask = await service.beside(lambda: parse(parse_body(data)))
    model = service.check_model(ask.model)
    count = ask.n * max(1, len(ask.prompts))
    service.admit(count)
    try:
        job = await service.prepare(ask)
        shape: Shape = shape_of(job.id, model, ask, job.prompts, service.tokenizer)
        if ask.stream:
            return EventStream(service, job, shape, count)
        body = await service.attend(_whole(service, job, shape), _hang_up(request.receive))
    except BaseException:
        service.release(count)
        raise
    service.release(count)
    return Response(status_code=_CLIENT_GONE) if body is None else JSONResponse(body)


async def _hang_up(receive: Receive) -> None:
    """Ends when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(service: Service, job: Job, shape: Shape) -> Body:
    parts: dict[int, list[Delta]] = {choice.index: [] for choice in job.choices}
    async with aclosing(merge(job.choices, service.engine, service.metrics)) as deltas:
        async for choice, delta in deltas:
            parts[choice.index].append(delta)
    whole = [(choice, joined(parts[choice.index])) for choice in job.choices]
    return shape.whole(whole, usage(job.prompts, job.choices))


class EventStream(Response):
    """Server-sent events of one job. Gives back its places in the queue when it ends, however."""

    def __init__(self, service: Service, job: Job, shape: Shape, places: int) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._service = service
        self._job = job
        self._shape = shape
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_HungUp):
            await self._answer(receive, _to_client(send))

    async def _answer(self, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._service.attend(self._pump(send), _hang_up(receive))
        except ApiError as error:
            # the status is sent already: an error event is how a stream tells of it
            await _send_event(send, error.body())
            await _send_part(send, b"data: [DONE]\n\n", last=True)
        finally:
            self._service.release(self._places)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._bodies()) as bodies:
            async for body in bodies:
                await _send_event(send, body)
        await _send_part(send, b"data: [DONE]\n\n", last=True)

    async def _bodies(self) -> AsyncGenerator[Body]:
        job, shape, service = self._job, self._shape, self._service
        for choice in job.choices:
            for body in shape.opening(choice):
                yield body
        begun: set[int] = set()
        async with aclosing(merge(job.choices, service.engine, service.metrics)) as deltas:
            async for choice, delta in deltas:
                for body in shape.chunks(choice, delta, choice.index not in begun):
                    yield body
                begun.add(choice.index)
        if job.ask.include_usage:
            yield shape.usage_chunk(usage(job.prompts, job.choices))


class _HungUp(Exception):
    """The connection was closed under an answer."""


def _to_client(send: Send) -> Send:
    """`send`, which tells of a closed connection in one way, whatever the event loop raises."""

    async def deliver(message: Message) -> None:
        try:
            await send(message)
        except (OSError, RuntimeError) as error:
            raise _HungUp from error

    return deliver


async def _send_event(send: Send, body: object) -> None:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    await _send_part(send, f"data: {text}\n\n".encode())


async def _send_part(send: Send, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})
