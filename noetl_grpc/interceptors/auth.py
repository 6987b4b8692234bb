"""Bearer tokens, default deny: an RPC that nobody declared public needs one."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import orjson

from noetl_grpc import calls
from noetl_grpc.core.access import Caller, authorise, parse_tokens
from noetl_grpc.errors import AuthNotConfigured, InvalidRequest, NoetlError, SettingsError, Unauthenticated
from noetl_grpc.interceptors.load import Lanes

logger = logging.getLogger("noetl_grpc.auth")

#: How often the tokens file is looked at.
LOOK_SECONDS = 1.0

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
    """Knows the token with full access and the named ones of a file, which is read again when it changes."""

    def __init__(
        self,
        api_token: str,
        *,
        tokens_file: Path | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        token = api_token.strip()
        self._digest = _digest(token) if token else None
        self._file = tokens_file
        self._now = now
        self._monotonic = monotonic
        self._stamp: object = None
        self._look_at = float("-inf")
        self._callers: dict[bytes, Caller] = {}
        if tokens_file is not None:
            try:
                self._read()
            except (OSError, ValueError, InvalidRequest) as error:
                raise SettingsError(f"NOETL_API_TOKENS_FILE can't be used: {_told(error)}") from None

    def authenticate(self, metadata: Any) -> Caller:
        """Who the `authorization` header stands for."""
        if self._digest is None and self._file is None:
            raise AuthNotConfigured(
                "this server has no token configured, so it lets nobody in; set NOETL_INTERNAL_API_TOKEN"
                " or NOETL_API_TOKENS_FILE on the server",
                metadata={"setting": "NOETL_INTERNAL_API_TOKEN"},
            )
        digest = _digest(_bearer_token(metadata))
        if self._digest is not None and hmac.compare_digest(digest, self._digest):
            return _INTERNAL
        caller = self._named(digest)
        if caller is None or (caller.expires_at is not None and caller.expires_at <= self._now()):
            raise Unauthenticated(
                f"the token is not known here or has expired; {_EXPECTED}", reason="TOKEN_INVALID"
            )
        return caller

    def _named(self, digest: bytes) -> Caller | None:
        """Looked up by its digest: how long that takes tells nothing about a token."""
        if self._file is not None and self._monotonic() >= self._look_at:
            try:
                self._read()
            except (OSError, ValueError, InvalidRequest) as error:
                # Half an edit must not lock everybody out.
                logger.error("the tokens file can't be used, the last good one stays: %s", _told(error))
        return self._callers.get(digest)

    def _read(self) -> None:
        assert self._file is not None
        self._look_at = self._monotonic() + LOOK_SECONDS
        found = self._file.stat()
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return
        self._callers = parse_tokens(orjson.loads(self._file.read_bytes()))
        self._stamp = stamp


def _told(error: Exception) -> str:
    return error.strerror or "it can't be read" if isinstance(error, OSError) else str(error)


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
        lanes: Lanes,
        public_services: frozenset[str] = PUBLIC_SERVICES,
    ) -> None:
        self._checker = checker
        self._deny = deny
        self._lanes = lanes
        self._public_services = public_services

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        call = calls.begin(method, metadata)
        try:
            if method[1 : method.rfind("/")] in self._public_services:
                self._lanes.public.enter()
            else:
                caller = self._checker.authenticate(metadata)
                if caller.is_limited:
                    authorise(caller, method)
                call.caller = caller
                self._lanes.of(method).enter()
        except NoetlError as error:
            return self._deny(method, error)
        return await continuation(handler_call_details)
