"""Bearer tokens, default deny: an RPC that nobody declared public needs one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from noetl_grpc import calls
from noetl_grpc.calls import Caller
from noetl_grpc.errors import AuthNotConfigured, NoetlError, Unauthenticated

#: Services that answer without a token.
PUBLIC_SERVICES = frozenset(
    {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_INTERNAL = Caller(name="internal")
_EXPECTED = "send the header 'authorization: Bearer <token>'"


class TokenChecker:
    """Knows the token with full access; a blank one lets nobody in."""

    def __init__(self, api_token: str) -> None:
        token = api_token.strip()
        self._digest = _digest(token) if token else None

    def authenticate(self, metadata: Any) -> Caller:
        """Who the `authorization` header stands for."""
        if self._digest is None:
            raise AuthNotConfigured(
                "this server has no token configured, so it lets nobody in; set NOETL_INTERNAL_API_TOKEN"
                " or NOETL_API_TOKENS_FILE on the server",
                metadata={"setting": "NOETL_INTERNAL_API_TOKEN"},
            )
        token = _bearer_token(metadata)
        if not hmac.compare_digest(_digest(token), self._digest):
            raise Unauthenticated(
                f"the token is not known here or has expired; {_EXPECTED} with a valid one",
                reason="TOKEN_INVALID",
            )
        return _INTERNAL


def _bearer_token(metadata: Any) -> str:
    values = [value for key, value in metadata or () if key == "authorization"]
    if not values:
        raise Unauthenticated(f"no token; {_EXPECTED}", reason="TOKEN_MISSING")
    if len(values) > 1:
        raise Unauthenticated(f"several authorization headers; {_EXPECTED} once", reason="TOKEN_MALFORMED")
    header = values[0]
    scheme, _, token = (header if isinstance(header, str) else "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated(f"the authorization header is malformed; {_EXPECTED}", reason="TOKEN_MALFORMED")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through, or answers it with the reason why not. Every call begins here."""

    def __init__(
        self,
        checker: TokenChecker,
        *,
        deny: Callable[[str, NoetlError], Handler],
        public_services: frozenset[str] = PUBLIC_SERVICES,
    ) -> None:
        self._checker = checker
        self._deny = deny
        self._public_services = public_services

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        call = calls.begin(method, metadata)
        if method[1 : method.rfind("/")] not in self._public_services:
            try:
                call.caller = self._checker.authenticate(metadata)
            except NoetlError as error:
                return self._deny(method, error)
        return await continuation(handler_call_details)
