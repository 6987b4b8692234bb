"""The rim of every call: parses the message, runs the servicer, and turns what it raises into a status.

Our exceptions become the status of `status.py`. Anything else is a bug: it is logged with its traceback, and
the caller gets an id to report. Without this rim grpc.aio would send the exception's text to the client.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from noetl_grpc import calls, status
from noetl_grpc.calls import Call
from noetl_grpc.core.access import authorise_request
from noetl_grpc.errors import (
    Internal,
    InvalidRequest,
    NoetlError,
    RequestTooLarge,
    ResourceExhausted,
    ShuttingDown,
    Unavailable,
)
from noetl_grpc.interceptors.access import MethodObserver, Observers

logger = logging.getLogger("noetl_grpc")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class OpenStream:
    """One stream being served."""

    __slots__ = ("call", "is_ended", "is_writing", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.call = calls.current()
        self.is_writing = False
        self.is_ended = False

    def end(self) -> None:
        """Interrupt it. One that is just writing ends itself behind the message: gRPC has no status to send before."""
        self.is_ended = self.call.is_ending = True
        if not self.is_writing:
            self.task.cancel()


class OpenStreams:
    """The streams being served, which are ended together when the server goes away."""

    def __init__(self) -> None:
        self._open: set[OpenStream] = set()
        self._ending = False

    def enter(self) -> OpenStream:
        """Count the running task in."""
        if self._ending:
            raise ShuttingDown("the server is shutting down")
        task = asyncio.current_task()
        assert task is not None
        stream = OpenStream(task)
        self._open.add(stream)
        return stream

    def leave(self, stream: OpenStream) -> None:
        """Count it out."""
        self._open.discard(stream)

    def end_all(self) -> None:
        """Interrupt every open stream; each is answered with SHUTTING_DOWN and its resume token."""
        self._ending = True
        for stream in self._open:
            stream.end()


class Rim:
    """Wraps handlers once, when they are registered, so that a call pays for nothing but the work itself."""

    def __init__(self, *, observers: Observers, streams: OpenStreams, request_bytes_max: int) -> None:
        self._observers = observers
        self._streams = streams
        self._request_bytes_max = request_bytes_max

    def wrap(self, method: str, handler: Handler) -> Handler:
        """The same handler with parsing, status and observation around it."""
        observer = self._observers.of(method)
        parse = self._parser(handler.request_deserializer)
        if handler.unary_unary is not None:
            behaviour = self._unary(handler.unary_unary, parse, observer)
            return grpc.unary_unary_rpc_method_handler(behaviour, None, handler.response_serializer)
        if handler.unary_stream is not None:
            behaviour = self._stream(handler.unary_stream, parse, observer, is_unary=True)
            return grpc.unary_stream_rpc_method_handler(behaviour, None, handler.response_serializer)
        behaviour = self._stream(
            handler.stream_stream, lambda requests: _parse_each(requests, parse), observer, is_unary=False
        )
        return grpc.stream_stream_rpc_method_handler(behaviour, None, handler.response_serializer)

    def denial(self, method: str, error: NoetlError) -> Handler:
        """A handler that only fails. It takes a stream, so that it need not wait for a first message."""
        observer = self._observers.of(method)

        async def deny(request_iterator: Any, context: Any) -> None:
            await self._fail(error, calls.current(), context, observer, observer.start())

        return grpc.stream_stream_rpc_method_handler(deny)

    def _parser(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        limit = self._request_bytes_max

        def parse(raw: bytes) -> Any:
            if len(raw) > limit:
                raise RequestTooLarge(
                    f"the request has {len(raw)} bytes, the limit is {limit}; send it in smaller parts",
                    limit_bytes=limit,
                )
            try:
                return deserialize(raw) if deserialize is not None else raw
            except (DecodeError, ValueError):
                raise InvalidRequest("request", "is not a message of this RPC's request type") from None

        return parse

    def _unary(self, behaviour: Any, parse: Callable[[bytes], Any], observer: MethodObserver) -> Any:
        if not inspect.iscoroutinefunction(behaviour):
            # The generated base of a service that is not built yet; its methods raise at once.
            behaviour = _awaitable(behaviour)

        async def serve(raw: bytes, context: Any) -> Any:
            call = calls.current()
            began = observer.start()
            try:
                request = parse(raw)
                if call.caller.is_limited:
                    authorise_request(call.caller, call.method, request)
                response = await behaviour(request, context)
            except BaseException as raised:
                await self._fail(raised, call, context, observer, began)
                raise
            observer.finish(call, grpc.StatusCode.OK, began)
            return response

        return serve

    def _stream(
        self, behaviour: Any, parse: Callable[[Any], Any], observer: MethodObserver, *, is_unary: bool
    ) -> Any:
        async def serve(raw: Any, context: Any) -> None:
            call = calls.current()
            began = observer.start()
            stream: OpenStream | None = None
            try:
                stream = self._streams.enter()
                request = parse(raw)
                if call.caller.is_limited and is_unary:
                    authorise_request(call.caller, call.method, request)
                responses = behaviour(request, context)
                if inspect.isawaitable(responses):
                    await responses
                else:
                    async with aclosing(responses):
                        async for response in responses:
                            stream.is_writing = True
                            await context.write(response)
                            stream.is_writing = False
                            if stream.is_ended:
                                # Takes effect where the servicer next waits: it has noted by then what was sent.
                                stream.task.cancel()
            except BaseException as raised:
                ended = stream is not None and stream.is_ended and isinstance(raised, asyncio.CancelledError)
                cause = ShuttingDown("the server is shutting down; resume elsewhere") if ended else raised
                await self._fail(cause, call, context, observer, began)
                raise
            finally:
                if stream is not None:
                    self._streams.leave(stream)
            observer.finish(call, grpc.StatusCode.OK, began)

        return serve

    async def _fail(
        self, raised: BaseException, call: Call, context: Any, observer: MethodObserver, began: float
    ) -> None:
        """Answer the call with what was raised; returns only where grpc has the answer already."""
        if isinstance(raised, asyncio.CancelledError):
            remaining = context.time_remaining()
            late = remaining is not None and remaining <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            observer.finish(call, code, began)
            return
        if isinstance(raised, grpc.aio.AbortError):
            observer.finish(call, _code_of(context), began)
            return
        if isinstance(raised, NotImplementedError):
            observer.finish(call, grpc.StatusCode.UNIMPLEMENTED, began)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call.method} is not served here")
        error = raised if isinstance(raised, NoetlError) else _bug(raised, call)
        if call.resume_token and isinstance(error, (Unavailable, ResourceExhausted)):
            error.metadata["resume_token"] = call.resume_token
        observer.finish(call, status.code_of(error), began, reason=error.reason)
        await context.abort_with_status(rpc_status.to_status(status.to_status(error)))


def _bug(raised: BaseException, call: Call) -> Internal:
    identity = uuid.uuid4().hex[:12]
    logger.error(
        "internal error %s in %s",
        identity,
        call.method,
        exc_info=raised,
        extra={"error_id": identity, "request_id": call.request_id, "method": call.method},
    )
    return Internal(f"internal error; report it with the id {identity}", metadata={"id": identity})


def _code_of(context: Any) -> grpc.StatusCode:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)


async def _parse_each(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for raw in requests:
        yield parse(raw)


def _awaitable(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def respond(request: Any, context: Any) -> Any:
        return behaviour(request, context)

    return respond


class MethodTable(grpc.GenericRpcHandler):
    """Every method of every service by its name. Services register with it as they would with a server."""

    def __init__(self, rim: Rim) -> None:
        self._rim = rim
        self._handlers: dict[str, Handler] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        """Called by the generated code that adds a servicer to a server."""
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self._handlers[method] = self._rim.wrap(method, handler)

    def add_generic_rpc_handlers(self, handlers: Iterable[object]) -> None:
        """The generated code's older way to register the same methods."""

    def only(self, services: Collection[str]) -> MethodTable:
        """The methods of these services, for a listener that serves no others."""
        table = MethodTable(self._rim)
        for method, handler in self._handlers.items():
            if method[1 : method.rfind("/")] in services:
                table._handlers[method] = handler
        return table

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """What gRPC asks for each call."""
        return self._handlers.get(handler_call_details.method)
