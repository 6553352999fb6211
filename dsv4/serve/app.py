"""The routes, and requests from their bytes to a job."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dsv4.errors import UserError
from dsv4.json_object import parse_json_object
from dsv4.serve.answering import Question
from dsv4.serve.asked import completion_questions
from dsv4.serve.asked_chat import chat_question
from dsv4.serve.chat import ChatAnswer
from dsv4.serve.completion import CompletionAnswer
from dsv4.serve.errors import ApiError, server_ending, server_fault
from dsv4.serve.fields import ChatFields, CommonFields, CompletionFields, read_fields
from dsv4.serve.guard import Guard
from dsv4.serve.reply import Answer, Reply, StreamedReply, json_response
from dsv4.serve.service import Service
from dsv4.serve.worker import Cancelled, Check, QueueFull

# The fields of a request, its questions, and the answer that they become.
Asked = tuple[CommonFields, Sequence[Question], Answer]


def build_app(service: Service, api_key: str | None) -> Starlette:
    """The application. With an ``api_key`` only who has it may ask."""

    async def health(_: Request) -> Response:
        return json_response({"status": "ok", "requests": service.worker.waiting})

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.model_name:
            raise ApiError(404, f"found no model {name[:80]!r}", "model", "model_not_found")
        return json_response(_model(service))

    async def chat_completions(request: Request) -> Reply:
        return await _reply(service, request, _asked_chat)

    async def completions(request: Request) -> Reply:
        return await _reply(service, request, _asked_completion)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
        Exception: _fault,
    }
    guard = Middleware(Guard, api_key=api_key)
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _reply(
    service: Service, request: Request, ask: Callable[[Service, dict[str, Any]], Asked]
) -> Reply:
    """Checks the request before it waits. Raises ``ApiError``."""
    try:
        # A client that sends half a body and no more would hold up the end of the server.
        body = await service.worker.before_end(_read_body(request, service.most_body_bytes))
    except Cancelled:
        raise server_ending() from None
    fields, questions, answer = await run_in_threadpool(_checked, service, body, ask)

    def work(check: Check) -> Iterator[object]:
        for index, question in enumerate(questions):
            for said in service.answering.answer(question, check):
                yield index, said

    try:
        job = service.worker.submit(work)
    except QueueFull:
        message = f"the queue is full: {service.worker.waiting} requests"
        raise ApiError(503, message, code="queue_full") from None
    except Cancelled:
        raise server_ending() from None
    if not fields.stream:
        return Reply(service, job, answer)
    options = fields.stream_options
    with_usage = options is not None and options.include_usage is True
    return StreamedReply(service, job, answer, with_usage)


async def _read_body(request: Request, most: int) -> bytes:
    """Raises ``ApiError`` for a body that is too large, without reading it to its end, for one that
    is compressed, and for one that does not say that it is JSON: a page of the web may send any
    other kind to this machine.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type: found {kind[:80]!r}, expected application/json")
    packing = request.headers.get("content-encoding", "identity").strip().lower()
    if packing != "identity":
        raise ApiError(415, f"Content-Encoding: found {packing[:80]!r}, expected none")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ApiError(413, f"body: found more than {most} bytes", code="body_too_large")
    return bytes(body)


def _checked(
    service: Service, body: bytes, ask: Callable[[Service, dict[str, Any]], Asked]
) -> Asked:
    """The request in a body. Raises ``ApiError``."""
    try:
        return ask(service, parse_json_object(body.decode("utf-8"), "body"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: byte {error.start} is not UTF-8") from None
    except UserError as error:
        raise ApiError(400, str(error)) from None
    except RecursionError:
        raise ApiError(400, "body: found too many objects inside each other") from None


def _asked_chat(service: Service, raw: dict[str, Any]) -> Asked:
    fields = read_fields(ChatFields, raw)
    asked = chat_question(service, fields)
    answer = ChatAnswer(asked, service.model_name, service.files.tokenizer)
    return fields, [asked.question], answer


def _asked_completion(service: Service, raw: dict[str, Any]) -> Asked:
    fields = read_fields(CompletionFields, raw)
    questions, prompts = completion_questions(service, fields)
    tokenizer = service.files.tokenizer
    answer = CompletionAnswer(fields, questions, prompts, service.model_name, tokenizer)
    return fields, questions, answer


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "dsv4",
        "max_model_len": service.max_context,
    }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body(), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, and methods that a path lacks: the headers name those that it has."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    body = ApiError(error.status_code, f"{where}: {error.detail}").body()
    return json_response(body, error.status_code, error.headers)


async def _left(_: Request, __: Exception) -> Response:
    """To a client that has left before the end of its request; nobody reads it."""
    return Response(status_code=400)


async def _fault(_: Request, error: Exception) -> Response:
    """A fault of the program in a handler: its traceback goes to the log."""
    return json_response(server_fault(error).body(), 500)
