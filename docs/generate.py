"""Writes the pages that follow from the code: configuration.md, errors.md and api.md.

`--check` writes nothing, names the pages that differ and then exits 1.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from noetl_grpc import errors, status
from noetl_grpc.settings import EventStreamSettings, Rejected, Settings, TracingSettings

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PROTOS = ROOT / "protos"

#: What each reason means to a caller, and what to do about it.
REASONS = {
    "FIELD_INVALID": (
        "A field is missing, malformed or out of bounds (BadRequest names each), or the bytes are no such message.",
        "Fix the request.",
    ),
    "TOKEN_MISSING": ("There is no `authorization` header.", "Send `authorization: Bearer <token>`."),
    "TOKEN_MALFORMED": (
        "Several headers, another scheme, or an empty token.",
        "Send `authorization: Bearer <token>` once.",
    ),
    "TOKEN_INVALID": ("The token is unknown or has expired.", "Get a new one."),
    "SCOPE_MISSING": (
        "The token lacks the scope in `scope`.",
        "Use another token, or add the scope to its entry.",
    ),
    "TENANT_DENIED": (
        "The token is bound to other tenants, or the RPC speaks of none.",
        "Use a token of that tenant, or an unbound one.",
    ),
    "SUBSCRIPTION_NOT_FOUND": ("No lifecycle event has that subscription id.", "Stop."),
    "CATALOG_ENTRY_NOT_FOUND": ("The catalog has no entry of that path.", "Register it in NoETL first."),
    "EVENT_NOT_FOUND": ("That tenant's log has no such event.", "Stop."),
    "OUTBOX_ROW_NOT_FOUND": ("No outbox row has that id.", "Stop."),
    "PROJECTION_NOT_FOUND": (
        "That execution has no snapshot yet.",
        "Call AdvanceProjections, then ask again.",
    ),
    "SERVICE_NOT_FOUND": ("Health is asked for a service that is not served here.", "Mind the full name."),
    "ILLEGAL_TRANSITION": (
        "The lifecycle forbids the action. `state`, `action` and `allowed_from` say why.",
        "Look at the state.",
    ),
    "NOT_A_SUBSCRIPTION": ("The catalog entry is of another kind.", "Choose another path."),
    "EVENT_MALFORMED": (
        "An event can't be folded under the strict rules; `event_id` and `path` name the place.",
        "Replay by the union rules, or mend the event.",
    ),
    "ETAG_MISMATCH": ("The subscription has changed since it was read.", "Read it again and decide anew."),
    "LEASE_LOST": (
        "The claim token no longer holds the row: somebody else has it or had it.",
        "Drop the row.",
    ),
    "LEASE_HELD": ("Another runtime holds the subscription.", "Wait until its lease ends."),
    "CONFLICT": (
        "Another transaction was faster, and our own retries did not help.",
        "Retry the whole operation.",
    ),
    "OVERLOADED": (
        "No connection in time, too many calls or streams, or a stream that is read too slowly.",
        "Retry with back-off; go on with `resume_token` where there is one.",
    ),
    "REQUEST_TOO_LARGE": ("The request is above `limit_bytes`.", "Send it in smaller parts."),
    "STATE_TOO_LARGE": ("The state is above `limit_bytes`.", "Ask for one projection at a time."),
    "DATABASE_UNAVAILABLE": ("The database is out of reach.", "Retry with back-off."),
    "BROKER_UNAVAILABLE": ("NATS is out of reach.", "Retry with back-off."),
    "AUTH_NOT_CONFIGURED": (
        "The server has neither `NOETL_INTERNAL_API_TOKEN` nor a tokens file.",
        "Configure one on the server.",
    ),
    "SHUTTING_DOWN": (
        "The server is going away.",
        "Retry elsewhere; go on with `resume_token` where there is one.",
    ),
    "DEADLINE_EXCEEDED": ("The call's deadline passed; the statement was cancelled.", "Allow more time."),
    "INTERNAL": ("A bug; `id` stands beside the traceback in the server's log.", "Report it with the id."),
}


def configuration() -> str:
    """Every variable, from the settings' own declarations."""
    lines = [
        "# Configuration",
        "",
        "Everything is an environment variable, read once at the start. A value that can't be used stops the process",
        "with one line that names it and what is accepted, and exit code 2.",
        "",
    ]
    for title, settings in (
        ("The server", Settings),
        ("The tailer", EventStreamSettings),
        ("Tracing, of the server and the workers", TracingSettings),
    ):
        lines += [f"## {title}", "", "| variable | default | accepted | meaning |", "|---|---|---|---|"]
        for item in fields(settings):
            meta = item.metadata
            if "env" in meta:
                default = f"`{meta['default']}`" if meta["default"] else ""
                lines.append(f"| `{meta['env']}` | {default} | {_accepted(meta['parse'])} | {meta['text']} |")
        lines.append("")
    lines += [
        "Without `NOETL_SHARDS` and `NOETL_DATABASE_URL` the database is put together from `POSTGRES_HOST`,",
        "`POSTGRES_PORT` (5432), `POSTGRES_USER` (noetl), `POSTGRES_PASSWORD` and `POSTGRES_DATABASE` (noetl).",
        "",
    ]
    return "\n".join(lines)


def _accepted(parse: Any) -> str:
    """A parser's own word on what it takes, got by giving it what none of them does."""
    try:
        parse("\x01://")
    except Rejected as rejected:
        said = str(rejected).removeprefix("entry 0 to be ")
        return said.partition(" (")[0].replace("|", "\\|")
    return "text"


def error_reasons() -> str:
    """Every reason with its code, from the exceptions that are raised."""
    found = dict(_reasons())
    if found.keys() != REASONS.keys():
        sys.exit(f"docs/generate.py explains other reasons than there are: {found.keys() ^ REASONS.keys()}")
    lines = [
        "# Errors",
        "",
        "A failed call carries `google.rpc` details in `grpc-status-details-bin`: an `ErrorInfo` with one of these",
        f"reasons, the domain `{status.DOMAIN}` and, as metadata, every value that the text mentions; `BadRequest`",
        "with each field that is wrong; `RetryInfo` where a retry can help. Reasons and codes are stable.",
        "",
        "| reason | code | RetryInfo | meaning | what to do |",
        "|---|---|---|---|---|",
    ]
    for reason, (meaning, advice) in REASONS.items():
        cls = found[reason]
        retry = "yes" if cls.retry_after_seconds is not None else ""
        lines.append(f"| `{reason}` | {status.CODES[cls].name} | {retry} | {meaning} | {advice} |")
    lines += [
        "",
        "Rejected events, failed projections and kept partitions have reasons of their own inside a successful answer;",
        "[events.md](events.md) and the [API](api.md) list them.",
        "",
    ]
    return "\n".join(lines)


def _reasons() -> Iterator[tuple[str, type[errors.NoetlError]]]:
    """What is raised: the classes' own reasons, and those that are given where an exception is made."""
    given = set()
    for file in sorted((ROOT / "noetl_grpc").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            cls = getattr(errors, node.func.id, None)
            for keyword in node.keywords:
                if (
                    cls in status.CODES
                    and keyword.arg == "reason"
                    and isinstance(keyword.value, ast.Constant)
                ):
                    given.add(cls)
                    yield keyword.value.value, cls
    for cls in status.CODES:
        if not cls.__subclasses__() and cls not in given:
            yield cls.reason, cls


def api() -> str:
    """Services, messages and enums with their comments, from the protos."""
    lines = [
        "# API",
        "",
        "Generated from [`protos/`](../protos). Every RPC needs `authorization: Bearer <token>`; health and reflection",
        "need none. Ids are `int64`, which JSON shows as strings. [errors.md](errors.md) lists why calls fail.",
        "",
    ]
    services: list[str] = []
    types: list[str] = []
    for file in _files():
        comments = {tuple(place.path): place for place in file.source_code_info.location}
        for number, service in enumerate(file.service):
            services += _service(file, service, (6, number), comments)
        for number, message in enumerate(file.message_type):
            types += _message(message, message.name, (4, number), comments)
        for number, enum in enumerate(file.enum_type):
            types += _enum(enum, (5, number), comments)
    return "\n".join([*lines, *services, "# Messages and enums", "", *types])


def _files() -> Iterator[descriptor_pb2.FileDescriptorProto]:
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
        command += [f"--descriptor_set_out={out}", "--include_source_info", *names]
        subprocess.run(command, check=True, timeout=120)
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    # KEDA's contract comes last: it is the only one that is not ours.
    return iter(sorted(found, key=lambda file: (file.package != "noetlpb.v1", file.name)))


Comments = dict[tuple[int, ...], Any]


def _comment(comments: Comments, path: tuple[int, ...], *, one_line: bool = False) -> str:
    place = comments.get(path)
    text = (place.leading_comments or place.trailing_comments) if place is not None else ""
    paragraphs = [
        " ".join(line.strip() for line in paragraph.splitlines()) for paragraph in text.strip().split("\n\n")
    ]
    return " ".join(paragraphs).replace("|", "\\|") if one_line else "\n\n".join(paragraphs)


def _service(file: Any, service: Any, path: tuple[int, ...], comments: Comments) -> list[str]:
    lines = [f"## {service.name}", "", f"`{file.package}.{service.name}`", "", _comment(comments, path), ""]
    for number, method in enumerate(service.method):
        takes = f"{'stream of ' if method.client_streaming else ''}{_link(method.input_type)}"
        gives = f"{'stream of ' if method.server_streaming else ''}{_link(method.output_type)}"
        lines += [f"### {method.name}", "", f"{takes} → {gives}", ""]
        lines += [_comment(comments, (*path, 2, number)), ""]
    return lines


def _message(message: Any, name: str, path: tuple[int, ...], comments: Comments) -> list[str]:
    lines = [f"## {name}", "", _comment(comments, path), ""]
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    if message.field:
        lines += ["| field | type | |", "|---|---|---|"]
    for number, field in enumerate(message.field):
        text = _comment(comments, (*path, 2, number), one_line=True)
        lines.append(f"| `{field.name}` | {_kind(field, message, maps)} | {text} |")
    lines.append("")
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            lines += _message(nested, f"{name}.{nested.name}", (*path, 3, number), comments)
    return lines


def _kind(field: Any, message: Any, maps: dict[str, Any]) -> str:
    if (
        entry := maps.get(field.type_name.rpartition(".")[2])
    ) is not None and field.label == field.LABEL_REPEATED:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    kind = _scalar(field)
    if field.label == field.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _scalar(field: Any) -> str:
    if field.type_name:
        return _link(field.type_name)
    return str(descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    for package in (".noetlpb.v1.", ".externalscaler."):
        if type_name.startswith(package):
            name = type_name.removeprefix(package)
            return f"[{name}](#{name.lower().replace('.', '')})"
    return f"`{type_name.lstrip('.')}`"


def _enum(enum: Any, path: tuple[int, ...], comments: Comments) -> list[str]:
    lines = [f"## {enum.name}", "", _comment(comments, path), "", "| value | number | |", "|---|---|---|"]
    for number, value in enumerate(enum.value):
        text = _comment(comments, (*path, 2, number), one_line=True)
        lines.append(f"| `{value.name}` | {value.number} | {text} |")
    return [*lines, ""]


PAGES = {"configuration.md": configuration, "errors.md": error_reasons, "api.md": api}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="report drift instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        file = DOCS / name
        text = page().rstrip() + "\n"
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.exit(f"docs: {', '.join(stale)} no longer follow from the code; run: make generate")


if __name__ == "__main__":
    main()
