"""What belongs to the call that is being served: who asked, under which id, and where a stream may go on.

It travels in a context variable, so that servicers keep the two arguments that gRPC gives them.
"""

from __future__ import annotations

import itertools
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from noetl_grpc.core.access import ANONYMOUS, Caller
from noetl_grpc.core.traceparent import HEADER, is_traceparent

if TYPE_CHECKING:
    from noetl_grpc.spans import CallSpan

#: What gRPC hands to a servicer beside the request.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


_process = uuid.uuid4().hex[:8]
_serial = itertools.count(1)


class Call:
    """One RPC while it runs."""

    __slots__ = ("_metadata", "_number", "caller", "is_ending", "method", "resume_token", "span")

    def __init__(self, method: str, metadata: Any = ()) -> None:
        self.method = method
        self.caller: Caller = ANONYMOUS
        #: A streaming servicer keeps this at what it last sent; an answer that ends the stream early repeats it.
        self.resume_token = ""
        #: The server goes away and ends this stream; neither its caller nor what it was sent is to blame.
        self.is_ending = False
        #: Where calls are traced.
        self.span: CallSpan | None = None
        self._metadata = metadata
        self._number = next(_serial)

    @property
    def request_id(self) -> str:
        """The caller's own id where it sent one, so that its log and ours can be read together."""
        return self.header("x-request-id")[:128] or f"{_process}-{self._number}"

    @property
    def traceparent(self) -> str | None:
        """What goes along with what this call stores, so that its trace goes on; None where its caller sent none."""
        sent = self.header(HEADER)
        if not is_traceparent(sent):
            return None
        return sent if self.span is None else self.span.traceparent

    def header(self, name: str) -> str:
        """What the caller sent under this name, in lower case; empty if nothing."""
        for key, value in self._metadata or ():
            if key == name and isinstance(value, str):
                return value
        return ""


_current: ContextVar[Call] = ContextVar("noetl_grpc_call")


def begin(method: str, metadata: Any) -> Call:
    """A new call of the running task."""
    call = Call(method, metadata)
    _current.set(call)
    return call


def current() -> Call:
    """The call that the running task serves."""
    return _current.get()
