"""The routes of the server."""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bass_jax.engine import Engine, EngineClosed, QueueFull, RequestEvent, RequestHandle
from bass_jax.models.protocol import context_of
from bass_jax.serving.metrics import Metrics
from bass_jax.serving.requests import MAX_CHOICES, ChatBody, CompletionBody, RequestError, parse
from bass_jax.serving.responses import Answer, error_body, usage
from bass_jax.serving.status_page import STATUS_PAGE

MAX_BODY = 4 * 2**20
"""Largest body in bytes."""


class Server:
    """Answers requests with an engine.

    Attributes:
        engine: with a tokenizer.
        metrics: of the engine; `Metrics.on_step` is the engine's ``on_step``.
        model: the name that requests have to give.
        api_key: expected as ``Authorization: Bearer KEY``; None for no key.
        max_seconds: a request that takes longer is cancelled.
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, model: str, *, api_key: str | None = None, max_seconds: float = 600.0
    ):
        self.engine, self.metrics, self.model = engine, metrics, model
        self.api_key, self.max_seconds = api_key, max_seconds
        self._tasks: set[asyncio.Future] = set()

    def app(self) -> Starlette:
        """Returns the ASGI application. When it shuts down, the engine is closed."""
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
            Route("/", self.status),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http_error})

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.engine.close)

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Checks the key, and turns exceptions into answers."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if self.api_key is not None and not hmac.compare_digest(
                given.encode("utf-8", "replace"), f"Bearer {self.api_key}".encode()
            ):
                message = "expected the header 'Authorization: Bearer KEY' with the server's key"
                return _error(401, message, "authentication_error")
            try:
                return await handler(request)
            except RequestError as error:
                return _error(error.status, str(error), "invalid_request_error", error.param)
            except QueueFull as error:
                self.metrics.requests.labels("refused").inc()
                return _error(429, str(error), "rate_limit_error", headers={"Retry-After": "1"})
            except EngineClosed as error:
                return _error(503, str(error), "server_error")
            except TimeoutError:
                self.metrics.requests.labels("timeout").inc()
                return _error(504, f"the request took longer than {self.max_seconds:g} s", "server_error")
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    async def completions(self, request: Request) -> Response:
        """Answers ``/v1/completions``."""
        return await self._answer(request, parse(CompletionBody, await _read(request)))

    async def chat(self, request: Request) -> Response:
        """Answers ``/v1/chat/completions``."""
        return await self._answer(request, parse(ChatBody, await _read(request)))

    async def models(self, request: Request) -> Response:
        """Lists the only model."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "bass-jax"}
        return JSONResponse({"object": "list", "data": [model]})

    async def show_metrics(self, request: Request) -> Response:
        """Answers ``/metrics``."""
        return Response(self.metrics.text(self.engine), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Tells whether the engine takes requests."""
        if self.engine.is_closed:
            return JSONResponse({"status": "closed"}, 503)
        return JSONResponse({"status": "ok"})

    async def status(self, request: Request) -> Response:
        """Shows the page that draws the metrics."""
        return HTMLResponse(STATUS_PAGE)

    async def _answer(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        if body.model != self.model:
            raise RequestError(f"model: {body.model[:80]!r} is not served; expected {self.model!r}", "model", 404)
        answer = Answer(isinstance(body, ChatBody), self.model, self.engine.pair.tokenizer, body.num_logprobs)
        if isinstance(body, ChatBody):
            answer.tool_names = tuple(body.tool_names)
        handles, num_prompts = self._submit(body)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._stream(answer, handles, num_prompts, include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        collecting = asyncio.ensure_future(self._collect(handles))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            events = collecting.result()
        finally:
            leaving.cancel()
            collecting.cancel()
            self._cancel(handles)
        choices = [answer.choice(i, handle, events[i]) for i, handle in enumerate(handles)]
        return JSONResponse(answer.envelope(choices, is_chunk=False) | {"usage": usage(handles, num_prompts)})

    def _submit(self, body: CompletionBody | ChatBody) -> tuple[list[RequestHandle], int]:
        engine = self.engine
        prompts = body.prompts(engine.pair.tokenizer)
        if len(prompts) * body.n > MAX_CHOICES:
            raise RequestError(f"n: {body.n} outputs of {len(prompts)} prompts: expected at most {MAX_CHOICES}", "n")
        most = engine.spec.num_logprobs or 0
        if (body.num_logprobs or 0) > most:
            name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            raise RequestError(f"{name}={body.num_logprobs}: this server was started with --logprobs {most}", name)
        sampling = body.sampling(engine.pair.target.vocab_size, engine.pair.tokenizer)
        seed = secrets.randbits(32) if body.seed is None else body.seed
        room = min(engine.config.capacity, context_of(engine.pair.target) or engine.config.capacity)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompts:
                limit = body.limit(max(1, room - len(prompt)))
                for _ in range(body.n):
                    handle = engine.submit(
                        prompt,
                        max_new_tokens=limit,
                        sampling=sampling,
                        seed=(seed + len(handles)) % 2**32,
                        stop_strings=body.stop_strings,
                        prefix_group=self.api_key or "",
                        is_speculative=body.speculative,
                    )
                    handles.append(handle)
                self.metrics.on_submit(len(prompt))
        except ValueError as error:
            self._cancel(handles)
            raise RequestError(str(error), "messages" if isinstance(body, ChatBody) else "prompt") from None
        except QueueFull:
            self._cancel(handles)
            raise
        return handles, len(prompts)

    def _cancel(self, handles: list[RequestHandle]) -> None:
        """Ends the requests that still run."""
        left = [handle for handle in handles if handle.finish_reason is None]
        for handle in left:
            handle.cancel()
        if left:
            task = asyncio.ensure_future(self._run_until_ended(left))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_until_ended(self, handles: list[RequestHandle]) -> None:
        """Runs steps until cancelled requests have ended, because no task iterates over them any more."""
        while any(handle.finish_reason is None for handle in handles) and not self.engine.is_closed:
            await self.engine.advance_async()

    async def _collect(self, handles: list[RequestHandle]) -> list[list[RequestEvent]]:
        async with asyncio.timeout(self.max_seconds):
            events = [[event async for event in handle] for handle in handles]
        for handle in handles:
            self._count(handle)
        return events

    def _count(self, handle: RequestHandle) -> None:
        self.metrics.requests.labels(handle.finish_reason).inc()

    async def _stream(
        self, answer: Answer, handles: list[RequestHandle], num_prompts: int, include_usage: bool
    ) -> AsyncIterator[str]:
        """Yields the server-sent events of all choices as they come."""
        queue: asyncio.Queue[tuple[int, RequestEvent | EngineClosed]] = asyncio.Queue()

        async def follow(index: int, handle: RequestHandle) -> None:
            try:
                async for event in handle:
                    queue.put_nowait((index, event))
            except EngineClosed as error:
                queue.put_nowait((index, error))

        offsets, has_begun, written = [0] * len(handles), [False] * len(handles), [""] * len(handles)
        tasks = [asyncio.ensure_future(follow(index, handle)) for index, handle in enumerate(handles)]
        num_left = len(handles)
        try:
            async with asyncio.timeout(self.max_seconds):
                while num_left:
                    index, event = await queue.get()
                    if isinstance(event, EngineClosed):
                        raise event
                    if event.finish_reason is not None:
                        num_left -= 1
                        self._count(handles[index])
                    calls: list[dict[str, Any]] = []
                    if answer.tool_names:
                        written[index] += event.text
                        text, calls = answer.visible(written[index], offsets[index], event.finish_reason)
                        event = event._replace(text=text)
                    if event.finish_reason is None and not event.text and answer.num_logprobs is None:
                        continue  # A part of a character, or of a call.
                    choice = answer.chunk(index, event, is_first=not has_begun[index], offset=offsets[index])
                    if calls:
                        choice["delta"]["tool_calls"], choice["finish_reason"] = calls, "tool_calls"
                    has_begun[index] = True
                    offsets[index] += len(event.text)
                    yield _data(answer.envelope([choice], is_chunk=True))
            if include_usage:
                yield _data(answer.envelope([], is_chunk=True) | {"usage": usage(handles, num_prompts)})
            yield "data: [DONE]\n\n"
        except TimeoutError:
            self.metrics.requests.labels("timeout").inc()
            yield _data(error_body(f"the request took longer than {self.max_seconds:g} s", "server_error"))
        except EngineClosed as error:
            yield _data(error_body(str(error), "server_error"))
        finally:
            for task in tasks:
                task.cancel()
            self._cancel(handles)


async def _read(request: Request) -> bytes:
    """Returns the body, which may have `MAX_BODY` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise RequestError(f"body: larger than {MAX_BODY} bytes", status=413)
    return bytes(body)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


def _error(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, param), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers a wrong path or method in the format of the API."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail), "invalid_request_error")
