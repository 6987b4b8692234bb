"""What belongs to the call that is being served: who asked, under which id, and where a stream may go on.

It travels in a context variable, so that servicers keep the two arguments that gRPC gives them.
"""

from __future__ import annotations

import itertools
import uuid
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from noetl_grpc.core.access import ANONYMOUS, Caller

#: What gRPC hands to a servicer beside the request.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


_process = uuid.uuid4().hex[:8]
_serial = itertools.count(1)


class Call:
    """One RPC while it runs."""

    __slots__ = ("_metadata", "_number", "caller", "is_ending", "method", "resume_token")

    def __init__(self, method: str, metadata: Any = ()) -> None:
        self.method = method
        self.caller: Caller = ANONYMOUS
        #: A streaming servicer keeps this at what it last sent; an answer that ends the stream early repeats it.
        self.resume_token = ""
        #: The server goes away and ends this stream; neither its caller nor what it was sent is to blame.
        self.is_ending = False
        self._metadata = metadata
        self._number = next(_serial)

    @property
    def request_id(self) -> str:
        """The caller's own id where it sent one, so that its log and ours can be read together."""
        for key, value in self._metadata or ():
            if key == "x-request-id" and isinstance(value, str):
                return value[:128]
        return f"{_process}-{self._number}"


_current: ContextVar[Call] = ContextVar("noetl_grpc_call")


def begin(method: str, metadata: Any) -> Call:
    """A new call of the running task."""
    call = Call(method, metadata)
    _current.set(call)
    return call


def current() -> Call:
    """The call that the running task serves."""
    return _current.get()
