"""The HTTP application: transformers' handlers for OpenAI's three paths, and what a server needs around them."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fastapi import HTTPException
from jinja2.exceptions import TemplateError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler, compute_usage

from accelpatch.errors import FOREIGN
from accelpatch.serving import bodies
from accelpatch.serving.batch import Batch
from accelpatch.serving.generation import OneModel, OneQueue, Queue
from accelpatch.serving.limits import LOOPBACK, Address, Limits
from accelpatch.serving.metrics import TYPE, Metrics
from accelpatch.serving.ticket import CURRENT, Ticket, TimeOver

LOG = logging.getLogger(__name__)
#: path -> its body's form and transformers' handler
PATHS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (bodies.Chat, ChatCompletionHandler),
    "/v1/completions": (bodies.Completion, CompletionHandler),
    "/v1/responses": (bodies.Response, ResponseHandler),
}


@dataclass(frozen=True)
class Served:
    """A loaded model with a tokenizer, under the name that requests use. context: its length in tokens, if known."""

    name: str
    model: Any
    tokenizer: Any
    context: int | None


class Server:
    """One model behind the three paths. `app` is its ASGI application."""

    def __init__(self, served: Served, limits: Limits, address: Address):
        self.metrics, self._served, self._limits, self._key = Metrics(), served, limits, address.api_key
        self._open, self.batch = 0, Batch(served.model, served.context)
        manager, state = (
            OneModel(served.name, served.model, served.tokenizer),
            OneQueue(Queue(limits, served.context, self.batch)),
        )
        self._handlers = {path: (form, handler(manager, state)) for path, (form, handler) in PATHS.items()}
        self._lacking = {"/v1/responses": reason} if (reason := why_not_responses()) is not None else {}
        self._template = set(inspect.signature(served.tokenizer.apply_chat_template).parameters)
        hosts = ["*"] if address.api_key else [*LOOPBACK, "[::1]"]  # a page of the web cannot name another one
        self.app = Starlette(
            routes=[
                *(Route(path, self._counted(path, self._answer), methods=["POST"]) for path in PATHS),
                Route("/v1/models", self._models), Route("/health", self._health), Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers={HTTPException: _failed, 404: _failed, 405: _failed},
            lifespan=self._living,
        )  # fmt: skip

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.batch.stop)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._served.name, "open": self._open})

    async def _metrics(self, request: Request) -> Response:
        self._check_key(request)
        return Response(self.metrics.text(), media_type=TYPE)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        entry = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [entry]})

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._key.encode()):
            raise HTTPException(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})

    def _counted(self, path: str, answer: Callable[[Request, str], Awaitable[Response]]) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                response = await answer(request, path)
            except HTTPException as error:
                response = await _failed(request, error)
            self.metrics.answered(path, response.status_code)
            return response

        return endpoint

    async def _answer(self, request: Request, path: str) -> Response:
        self._check_key(request)
        form, handler = self._handlers[path]
        if (reason := self._lacking.get(path)) is not None:
            return _error(501, reason)
        try:
            body = bodies.checked(form, await self._body(request))
            self._check_template(body)
        except bodies.Refused as error:
            return _error(400, str(error), error.param)
        if body.get("model", self._served.name) != self._served.name:
            return _error(404, f"this server has the model {self._served.name} alone", "model")
        if self._open >= self._limits.requests:
            return _error(429, f"{self._open} requests are open already: try again later", headers={"Retry-After": "1"})
        body["stream"] = body.get("stream", False)  # which /v1/responses takes for true
        length, seed = body.get(form.lengths[0]), body.pop("seed", None)
        ticket = Ticket(dict(body), self._limits.seconds, length, seed)
        with _Place(self, ticket) as place:
            response = await self._handled(request, handler, body | {"model": self._served.name}, ticket)
            return _Closing(response, place.stay())

    async def _body(self, request: Request) -> bytes:
        """The body. Raises HTTPException for one that is no JSON by its header, or too long."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the content type is not application/json")
        most, found = self._limits.body_bytes, bytearray()
        try:
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise HTTPException(413, f"the body is over {most} bytes", headers={"Connection": "close"})
        except ClientDisconnect:
            raise HTTPException(400, "the body did not come whole") from None
        return bytes(found)

    def _check_template(self, body: dict[str, Any]) -> None:
        taken = sorted(self._template & set(body.get("chat_template_kwargs", {})))
        if taken:
            raise bodies.Refused(f"chat_template_kwargs may not have {', '.join(taken)}", "chat_template_kwargs")
        biased = body.get("logit_bias") or {}
        size = len(self._served.tokenizer)
        wrong = next((key for key in biased if not (key.isdecimal() and key.isascii() and int(key) < size)), None)
        if wrong is not None:
            raise bodies.Refused(f"logit_bias has the key {wrong!r}, which is no token's number", "logit_bias")
        if not biased:
            body.pop("logit_bias", None)

    async def _handled(self, request: Request, handler: Any, body: dict[str, Any], ticket: Ticket) -> Response:
        """transformers' answer. Its own task, so that a client that hangs up ends it."""
        CURRENT.set(ticket)
        task = asyncio.ensure_future(handler.handle_request(body, uuid.uuid4().hex))
        watch = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            ticket.hung_up = not task.done()
            if ticket.hung_up:  # the thread ends it at its next token, or skips it
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                return Response(status_code=499)
            return await task
        except TimeOver as error:
            return _error(504, str(error))
        except (*FOREIGN, TemplateError) as error:
            if ticket.submitted:
                LOG.exception("a request failed")
                return _error(500, str(error))
            return _error(400, f"the messages cannot be put in the model's chat template: {error}", "messages")
        finally:
            watch.cancel()


def why_not_responses() -> str | None:
    """Why /v1/responses cannot be answered: transformers 5.10 makes no usage of tokens that newer releases of openai
    accept. None where it can."""
    try:
        compute_usage(1, 1)
    except ValueError as error:
        versions = f"transformers {metadata.version('transformers')} and openai {metadata.version('openai')}"
        return f"{versions} do not fit together for this path, upgrade transformers: {str(error).splitlines()[0]}"
    return None


class _Place:
    """Context manager: a place among the open requests, freed at the end unless it stays for a stream."""

    def __init__(self, server: Server, ticket: Ticket):
        self._server, self._ticket, self._stays = server, ticket, False

    def __enter__(self) -> _Place:
        self._server._open += 1
        self._server.metrics.open.set(self._server._open)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stays:
            self.free()

    def stay(self) -> _Place:
        self._stays = True
        return self

    def free(self, hung_up: bool = False) -> None:
        """Give the place back; what still generates for it ends at its next token."""
        self._ticket.hung_up = self._ticket.hung_up or hung_up
        self._server._open -= 1
        self._server.metrics.open.set(self._server._open)
        self._server.metrics.finished(self._ticket)


class _Closing:
    """A response that frees its place when it was sent, or when its client is gone, even before the first byte."""

    def __init__(self, inner: Response, place: _Place):
        self._inner, self._place, self.status_code = inner, place, inner.status_code

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = False

        async def watched(message: Any) -> None:
            nonlocal sent
            await send(message)
            sent = sent or (message["type"] == "http.response.body" and not message.get("more_body"))

        try:
            await self._inner(scope, receive, watched)
        finally:
            self._place.free(hung_up=not sent)


async def _gone(request: Request) -> None:
    """Return when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _failed(request: Request, error: Any) -> Response:
    return _error(error.status_code, str(error.detail), headers=error.headers)


def _error(status: int, message: str, param: str | None = None, headers: Any = None) -> Response:
    """As OpenAI's errors are."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(content, status_code=status, headers=headers)
