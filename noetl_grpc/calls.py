"""What belongs to the call that is being served: who asked, under which id, and where a stream may go on.

It travels in a context variable, so that servicers keep the two arguments that gRPC gives them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

#: What gRPC hands to a servicer beside the request.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of one organisation."""

    tenant_id: str
    organization_id: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a token stands for."""

    name: str
    #: `service:verb` pairs; None is every scope.
    scopes: frozenset[str] | None = None
    #: The tenants it may see; None is unbound.
    tenants: frozenset[Tenant] | None = None


#: A caller of a public RPC, who showed no token.
ANONYMOUS = Caller(name="", scopes=frozenset(), tenants=frozenset())


@dataclass(slots=True)
class Call:
    """One RPC while it runs."""

    method: str
    caller: Caller = field(default=ANONYMOUS)
    request_id: str = ""
    #: A streaming servicer keeps this at what it last sent; an answer that ends the stream early repeats it.
    resume_token: str = ""


_current: ContextVar[Call] = ContextVar("noetl_grpc_call")


def enter(call: Call) -> None:
    """Make this the call of the running task."""
    _current.set(call)


def current() -> Call:
    """The call that the running task serves."""
    return _current.get()
