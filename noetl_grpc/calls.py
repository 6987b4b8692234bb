"""What belongs to the call that is being served: who asked, under which id, and where a stream may go on.

It travels in a context variable, so that servicers keep the two arguments that gRPC gives them.
"""

from __future__ import annotations

import itertools
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from noetl_grpc.core.access import ANONYMOUS, Caller

#: What gRPC hands to a servicer beside the request.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(slots=True)
class Call:
    """One RPC while it runs."""

    method: str
    caller: Caller = field(default=ANONYMOUS)
    request_id: str = ""
    #: A streaming servicer keeps this at what it last sent; an answer that ends the stream early repeats it.
    resume_token: str = ""


_current: ContextVar[Call] = ContextVar("noetl_grpc_call")


_process = uuid.uuid4().hex[:8]
_serial = itertools.count(1)


def begin(method: str, metadata: Any) -> Call:
    """A new call of the running task."""
    call = Call(method, request_id=_request_id(metadata))
    _current.set(call)
    return call


def current() -> Call:
    """The call that the running task serves."""
    return _current.get()


def _request_id(metadata: Any) -> str:
    """The caller's own id where it sent one, so that its log and ours can be read together."""
    for key, value in metadata or ():
        if key == "x-request-id" and isinstance(value, str):
            return value[:128]
    return f"{_process}-{next(_serial)}"
