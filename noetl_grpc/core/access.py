"""Who may do what: scopes by service and verb, tenants by what a request names.

A token without scopes or tenants of its own may do everything. A token that is bound to tenants may use only the
RPCs that speak of tenants, and there only its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from noetl_grpc.errors import InvalidRequest, PermissionDenied

READ = "read"
WRITE = "write"

#: The area of each service that needs a token.
AREAS: Mapping[str, str] = {
    "noetlpb.v1.SubscriptionService": "subscription",
    "noetlpb.v1.ReplayService": "replay",
    "noetlpb.v1.OutboxService": "outbox",
    "noetlpb.v1.ProjectionService": "projection",
    "noetlpb.v1.OperationsService": "operations",
    "externalscaler.ExternalScaler": "outbox",
}

SCOPES = frozenset(f"{area}:{verb}" for area in AREAS.values() for verb in (READ, WRITE))

_READING_VERBS = (
    "Get",
    "List",
    "Count",
    "Watch",
    "Stream",
    "Wait",
    "Diff",
    "Explain",
    "ReplayState",
    "Verify",
)

#: RPCs whose requests name tenants, and so may be called with a bound token.
TENANT_METHODS = frozenset(
    {
        "/noetlpb.v1.ReplayService/ReplayState",
        "/noetlpb.v1.ReplayService/StreamEvents",
        "/noetlpb.v1.ReplayService/GetEvent",
        "/noetlpb.v1.ReplayService/DiffReplay",
        "/noetlpb.v1.ReplayService/ExplainReplay",
        "/noetlpb.v1.ProjectionService/GetProjection",
        "/noetlpb.v1.ProjectionService/WaitForProjection",
        "/noetlpb.v1.ProjectionService/AdvanceProjections",
        "/noetlpb.v1.ProjectionService/VerifyProjections",
        "/noetlpb.v1.ProjectionService/ProjectEvents",
        "/noetlpb.v1.ProjectionService/MaterializeEvents",
    }
)

_PROJECT_EVENTS = "/noetlpb.v1.ProjectionService/ProjectEvents"
_VERIFY_PROJECTIONS = "/noetlpb.v1.ProjectionService/VerifyProjections"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of one organisation."""

    tenant_id: str
    organization_id: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a token stands for."""

    name: str
    #: `area:verb` pairs; None is every scope.
    scopes: frozenset[str] | None = None
    #: The tenants it may see; None is unbound.
    tenants: frozenset[Tenant] | None = None
    #: From then on it is unknown; None is never.
    expires_at: datetime | None = None

    @property
    def is_limited(self) -> bool:
        """Whether each request must be looked at."""
        return self.scopes is not None or self.tenants is not None


#: A caller of a public RPC, who showed no token.
ANONYMOUS = Caller(name="")


def scope_of(method: str) -> str:
    """The scope that a method needs, by its name alone; an unknown service's can't be granted."""
    service, _, name = method.lstrip("/").partition("/")
    area = AREAS.get(service, "")
    is_read = service == "externalscaler.ExternalScaler" or name.startswith(_READING_VERBS)
    return f"{area}:{READ if is_read else WRITE}"


def authorise(caller: Caller, method: str) -> None:
    """Refuse a method that the caller may not call at all."""
    _require_scope(caller, scope_of(method))
    if caller.tenants is not None and method not in TENANT_METHODS:
        raise PermissionDenied(
            f"the token {caller.name!r} is bound to tenants, and this RPC has none; use an unbound token",
            reason="TENANT_DENIED",
            metadata={"token": caller.name},
        )


def authorise_request(caller: Caller, method: str, request: Any) -> None:
    """Refuse what only the request tells: a repair, an enqueue, somebody else's tenant."""
    if method == _VERIFY_PROJECTIONS and request.repair:
        _require_scope(caller, f"projection:{WRITE}")
    if method == _PROJECT_EVENTS and request.HasField("enqueue"):
        _require_scope(caller, f"outbox:{WRITE}")
    if caller.tenants is None:
        return
    for tenant in set(_tenants_of(method, request)):
        if tenant not in caller.tenants:
            raise PermissionDenied(
                f"the token {caller.name!r} may not see tenant {tenant.tenant_id!r} of organisation"
                f" {tenant.organization_id!r}",
                reason="TENANT_DENIED",
                metadata={
                    "token": caller.name,
                    "tenant_id": tenant.tenant_id,
                    "organization_id": tenant.organization_id,
                },
            )


def _require_scope(caller: Caller, scope: str) -> None:
    if caller.scopes is not None and scope not in caller.scopes:
        raise PermissionDenied(
            f"the token {caller.name!r} lacks the scope {scope}",
            reason="SCOPE_MISSING",
            metadata={"token": caller.name, "scope": scope},
        )


def _tenants_of(method: str, request: Any) -> Iterator[Tenant]:
    sources: Iterable[Any] = request.events if method == _PROJECT_EVENTS else (request,)
    for source in sources:
        yield tenant_named(source.tenant_id, source.organization_id)


def tenant_named(tenant_id: str, organization_id: str) -> Tenant:
    """The tenant that a request means: blank is `default`."""
    return Tenant(tenant_id.strip() or "default", organization_id.strip() or "default")


def parse_tokens(document: Any) -> dict[bytes, Caller]:
    """The callers of a tokens file by the digest of their token. Raises InvalidRequest naming what is wrong."""
    entries = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise InvalidRequest("tokens", "must be a list")
    callers: dict[bytes, Caller] = {}
    for number, entry in enumerate(entries):
        digest, caller = _parse_token(f"tokens[{number}]", entry)
        if digest in callers:
            raise InvalidRequest(f"tokens[{number}].sha256", "must not occur twice")
        callers[digest] = caller
    return callers


def token_entry(
    *,
    name: str,
    sha256: str,
    scopes: Iterable[str],
    tenants: Iterable[Tenant] = (),
    expires_at: datetime | None = None,
) -> dict[str, Any]:
    """An entry of a tokens file, as `parse_tokens` reads it."""
    entry: dict[str, Any] = {"name": name, "sha256": sha256, "scopes": sorted(set(scopes))}
    bound = sorted({(tenant.tenant_id, tenant.organization_id) for tenant in tenants})
    if bound:
        entry["tenants"] = [{"tenant_id": one, "organization_id": other} for one, other in bound]
    if expires_at is not None:
        entry["expires_at"] = expires_at.isoformat()
    return entry


def _parse_token(where: str, entry: Any) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict):
        raise InvalidRequest(where, "must be an object")
    unknown = set(entry) - {"name", "sha256", "scopes", "tenants", "expires_at"}
    if unknown:
        raise InvalidRequest(f"{where}.{min(unknown)}", "is not known")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name", "must be a text")
    try:
        digest = bytes.fromhex(entry.get("sha256", ""))
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise InvalidRequest(f"{where}.sha256", "must be 64 hexadecimal digits")
    return digest, Caller(
        name=name,
        scopes=_parse_scopes(where, entry.get("scopes")),
        tenants=_parse_tenants(where, entry.get("tenants")),
        expires_at=_parse_expiry(where, entry.get("expires_at")),
    )


def _parse_scopes(where: str, scopes: Any) -> frozenset[str]:
    if not isinstance(scopes, Sequence) or isinstance(scopes, str):
        raise InvalidRequest(f"{where}.scopes", "must be a list")
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidRequest(f"{where}.scopes", f"must hold only {', '.join(sorted(SCOPES))}")
    return frozenset(scopes)


def _parse_tenants(where: str, tenants: Any) -> frozenset[Tenant] | None:
    if tenants is None:
        return None
    if not isinstance(tenants, list):
        raise InvalidRequest(f"{where}.tenants", "must be a list")
    parsed = set()
    for tenant in tenants:
        if not isinstance(tenant, dict) or not set(tenant) <= {"tenant_id", "organization_id"}:
            raise InvalidRequest(f"{where}.tenants", "must hold objects of tenant_id and organization_id")
        names = (tenant.get("tenant_id", ""), tenant.get("organization_id", ""))
        if not all(isinstance(name, str) for name in names):
            raise InvalidRequest(f"{where}.tenants", "must hold texts")
        parsed.add(tenant_named(*names))
    return frozenset(parsed)


def _parse_expiry(where: str, expires_at: Any) -> datetime | None:
    if expires_at is None:
        return None
    try:
        moment = datetime.fromisoformat(expires_at)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{where}.expires_at", "must be a time such as 2027-01-31T00:00:00Z") from None
    if moment.tzinfo is None:
        raise InvalidRequest(f"{where}.expires_at", "must have a zone, such as the Z in 2027-01-31T00:00:00Z")
    return moment
