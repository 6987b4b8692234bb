"""Everything the process is told from outside, parsed and checked once at start-up.

The only module that reads the environment. A value that can't be used stops the process with one line
that names the variable and what is accepted; nothing is ever replaced by a default in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from noetl_grpc.errors import SettingsError

T = TypeVar("T")

DEFAULT_ADDRESS = "127.0.0.1:50051"
#: Where `noetl-grpc dev` says, in the folder it was started in, how to reach it.
DEV_READY_FILE = Path(".noetl/ready.json")

_FLAGS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
    "": False,
}


class Rejected(ValueError):
    """A parser's word on what it would have accepted."""


def _flag(text: str) -> bool:
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise Rejected("true, 1, yes, on or false, 0, no, off") from None


def _text(text: str) -> str:
    return text.strip()


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text.strip())
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise Rejected(f"a whole number from {low} to {high}")
        return value

    return parse


def _optional_integer(low: int, high: int) -> Callable[[str], int | None]:
    parse = _integer(low, high)
    return lambda text: parse(text) if text.strip() else None


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text.strip())
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise Rejected(f"a number of seconds from {low:g} to {high:g}")
        return value

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise Rejected("one of " + ", ".join(words))
        return word

    return parse


def _file(text: str) -> Path | None:
    if not text.strip():
        return None
    path = Path(text.strip())
    try:
        path.open("rb").close()
    except OSError as error:
        raise Rejected(f"the path of a file that can be read ({error.strerror or 'it can not'})") from None
    return path


def _directory(text: str) -> Path | None:
    if not text.strip():
        return None
    path = Path(text.strip())
    if not path.is_dir():
        raise Rejected("the path of an existing folder")
    return path


def _listen_address(text: str) -> tuple[str, int] | None:
    """`host:port`; empty means off."""
    text = text.strip()
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise Rejected("host:port with a port from 0 to 65535, or empty for off")
    return host, int(port)


def _broker_url(text: str) -> str:
    url = text.strip()
    if not url:
        return ""
    for part in url.split(","):
        split = _split(part.strip())
        if split is None or split.scheme not in ("nats", "tls", "ws", "wss"):
            raise Rejected("nats://host:port")
    return url


def _collector_url(text: str) -> str:
    url = text.strip()
    split = _split(url) if url else None
    if url and (split is None or split.scheme not in ("http", "https") or split.username is not None):
        raise Rejected("http://host:port or https://host:port")
    return url


def _split(url: str) -> Any:
    try:
        split = urlsplit(url)
        _ = split.port
    except ValueError:
        return None
    return split if split.hostname else None


def _database_url(text: str) -> str:
    url = text.strip()
    if not url:
        return ""
    split = _split(url)
    if split is None or split.scheme not in ("postgresql", "postgres"):
        raise Rejected("postgresql://user:password@host:port/database")
    return url


_DSN_KEYS = {
    "host": "host",
    "port": "port",
    "user": "user",
    "password": "password",
    "database": "database",
    "dbname": "database",
}


def _shard_url(text: str) -> str:
    """A URL, or NoETL's own `host=…;port=…;user=…;password=…;database=…`."""
    if "://" in text:
        return _database_url(text)
    accepted = Rejected(
        "a postgresql:// URL, or host=…;port=…;user=…;password=…;database=… with host and user"
    )
    parts: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = item.partition("=")
        name = _DSN_KEYS.get(key.strip().lower())
        if not equals or name is None or name in parts:
            raise accepted
        parts[name] = value.strip()
    if not parts.get("host") or not parts.get("user"):
        raise accepted
    return compose_database_url(
        host=parts["host"],
        port=parts.get("port", "5432"),
        user=parts["user"],
        password=parts.get("password", ""),
        database=parts.get("database", "noetl"),
    )


def compose_database_url(*, host: str, port: str, user: str, password: str, database: str) -> str:
    """Put the parts of a connection together, quoting what a URL can't hold."""
    secret = f":{quote(password, safe='')}" if password else ""
    return _database_url(
        f"postgresql://{quote(user, safe='')}{secret}@{host}:{port}/{quote(database, safe='')}"
    )


def _url_list(parse: Callable[[str], str]) -> Callable[[str], tuple[str, ...]]:
    def parse_all(text: str) -> tuple[str, ...]:
        if not text.strip():
            return ()
        entries = [entry.strip() for entry in text.split(",")]
        urls: list[str] = []
        for number, entry in enumerate(entries):
            try:
                urls.append(parse(entry) if entry else parse(";"))
            except Rejected as rejected:
                raise Rejected(f"entry {number} to be {rejected}") from None
        return tuple(urls)

    return parse_all


def setting(env: str, default: str, parse: Callable[[str], T], text: str, *, secret: bool = False) -> Any:
    """One variable: its name, default as it would be written, parser and one sentence for the documentation."""
    return field(
        default=parse(default),
        repr=not secret,
        metadata={"env": env, "default": default, "parse": parse, "text": text, "secret": secret},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStreamSettings:
    """The tailer: committed events to JetStream."""

    enabled: bool = setting(
        "NOETL_EVENT_STREAM_ENABLED", "false", _flag, "Whether the tailer publishes events to JetStream."
    )
    batch_size: int = setting(
        "NOETL_EVENT_STREAM_BATCH",
        "500",
        _integer(1, 10_000),
        "Events read and published at a time; while it is behind up to four times as many, but then no more than 2000.",
    )
    poll_ms: int = setting(
        "NOETL_EVENT_STREAM_POLL_MS",
        "10",
        _integer(1, 60_000),
        "How often the log is looked at when nothing wakes the tailer, in milliseconds.",
    )
    dedup_seconds: int = setting(
        "NOETL_EVENT_STREAM_DEDUP_SECS", "120", _integer(1, 86_400), "JetStream's duplicate window."
    )
    retention_seconds: int = setting(
        "NOETL_EVENT_STREAM_RETENTION_SECS",
        "86400",
        _integer(1, 2**31),
        "How long the stream keeps a message; at least the duplicate window.",
    )
    backfill: bool = setting(
        "NOETL_EVENT_STREAM_BACKFILL",
        "false",
        _flag,
        "At the very first start publish the whole history instead of tailing from now.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where spans go. OpenTelemetry's own names; what is not here, such as OTEL_TRACES_SAMPLER, it reads itself."""

    collector: str = setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "",
        _collector_url,
        "The OTLP collector that spans go to, by gRPC; turns tracing on, which needs the extra `otel`.",
        secret=True,
    )
    traces_collector: str = setting(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "",
        _collector_url,
        "The same for spans alone; wins over the other.",
        secret=True,
    )
    protocol: str = setting(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", _text, "How the collector is spoken to; only grpc is."
    )
    exporter: str = setting(
        "OTEL_TRACES_EXPORTER", "otlp", _text, "none leaves tracing off whatever else is set; else otlp."
    )
    disabled: bool = setting(
        "OTEL_SDK_DISABLED", "false", _flag, "Whether tracing is off whatever else is set."
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> TracingSettings:
        """Parse every variable; what would only matter with tracing on may be anything while it is off."""
        settings = cls(**_parse(cls, env))
        if settings.endpoint:
            for name, value, accepted in (
                ("OTEL_EXPORTER_OTLP_PROTOCOL", settings.protocol, "grpc"),
                ("OTEL_TRACES_EXPORTER", settings.exporter, "otlp"),
            ):
                if value.lower() not in ("", accepted):
                    raise SettingsError(f"{name} {value!r} can't be used; expected {accepted}")
        return settings

    @property
    def endpoint(self) -> str:
        """The collector's URL; empty where tracing is off."""
        if self.disabled or self.exporter.lower() == "none":
            return ""
        return self.traces_collector or self.collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the server. Made by `from_env`; tests build it by hand."""

    grpc_host: str = setting("NOETL_GRPC_HOST", "0.0.0.0", _text, "Address to listen on.")
    grpc_port: int = setting(
        "NOETL_GRPC_PORT", "50051", _integer(0, 65_535), "Port to listen on; 0 picks a free one."
    )
    ops_address: tuple[str, int] | None = setting(
        "NOETL_OPS_ADDR",
        "",
        _listen_address,
        "A second listener for health and KEDA without a token; empty is off.",
    )
    metrics_address: tuple[str, int] | None = setting(
        "NOETL_METRICS_ADDR", "0.0.0.0:9464", _listen_address, "Prometheus metrics; empty is off."
    )
    reflection: bool = setting(
        "NOETL_REFLECTION", "true", _flag, "Whether server reflection (grpcurl, buf curl) is offered."
    )

    api_token: str = setting(
        "NOETL_INTERNAL_API_TOKEN", "", _text, "The token with full access.", secret=True
    )
    tokens_file: Path | None = setting(
        "NOETL_API_TOKENS_FILE", "", _file, "JSON file with named, scoped tokens; re-read when it changes."
    )
    tls_certificate: Path | None = setting(
        "NOETL_TLS_CERT", "", _file, "PEM certificate chain; together with the key it turns TLS on."
    )
    tls_key: Path | None = setting("NOETL_TLS_KEY", "", _file, "PEM private key.")
    tls_client_ca: Path | None = setting(
        "NOETL_TLS_CLIENT_CA", "", _file, "PEM authorities; client certificates are then required."
    )

    database_url: str = setting(
        "NOETL_DATABASE_URL",
        "",
        _database_url,
        "The database, when there is one. Else `NOETL_SHARDS`, or `POSTGRES_HOST`, `POSTGRES_PORT`, `POSTGRES_USER`, `POSTGRES_PASSWORD`, `POSTGRES_DATABASE`.",
        secret=True,
    )
    shard_urls: tuple[str, ...] = setting(
        "NOETL_SHARDS",
        "",
        _url_list(_shard_url),
        "The shards in order, separated by commas: URLs, or `host=…;port=…;user=…;password=…;database=…`.",
        secret=True,
    )
    cluster_url: str = setting(
        "NOETL_CLUSTER_DSN",
        "",
        lambda text: _shard_url(text) if text.strip() else "",
        "The cluster database (catalog, leases); default the first shard.",
        secret=True,
    )
    direct_urls: tuple[str, ...] = setting(
        "NOETL_DIRECT_DATABASE_URL",
        "",
        _url_list(_shard_url),
        "Past PgBouncer, for session locks: one URL per shard in order; default the same databases.",
        secret=True,
    )
    pool_size_min: int = setting(
        "POSTGRES_MIN_CONNECTIONS", "1", _integer(0, 1000), "Connections a pool keeps open."
    )
    pool_size_max: int = setting(
        "POSTGRES_MAX_CONNECTIONS", "10", _integer(1, 1000), "Connections a pool may open, per database."
    )
    pool_wait_seconds: float = setting(
        "POSTGRES_ACQUIRE_TIMEOUT",
        "30",
        _seconds(0.01, 3600),
        "How long a call waits for a connection before it is refused as overloaded.",
    )
    statement_cache_size: int = setting(
        "NOETL_PG_STATEMENT_CACHE_CAPACITY",
        "100",
        _integer(0, 10_000),
        "Prepared statements per connection; 0 behind PgBouncer in transaction mode.",
    )

    nats_url: str = setting(
        "NOETL_NATS_URL", "", _broker_url, "The NATS servers, separated by commas.", secret=True
    )
    event_stream: EventStreamSettings = field(default_factory=EventStreamSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)

    machine_id: int | None = setting(
        "NOETL_SERVER_MACHINE_ID",
        "",
        _optional_integer(0, 1023),
        "The machine part of minted ids; empty leases one from the database.",
    )
    outbox_attempts_max: int = setting(
        "NOETL_OUTBOX_MAX_ATTEMPTS",
        "20",
        _integer(0, 2**31 - 1),
        "Attempts after which a failing outbox row is dead; 0 is never.",
    )
    subscription_drain_timeout_seconds: int = setting(
        "NOETL_SUBSCRIPTION_DRAIN_TIMEOUT_SECS",
        "300",
        _integer(0, 2**31 - 1),
        "How long a subscription may drain without any runtime before its path can be registered anew; 0 is at once.",
    )
    replay_concurrency: int = setting(
        "NOETL_REPLAY_CONCURRENCY",
        "4",
        _integer(1, 64),
        "Folds that run at the same time; more wait without a connection.",
    )
    payload_root: Path | None = setting(
        "NOETL_PAYLOAD_ROOT",
        "",
        _directory,
        "Folder of sha256-addressed payload files that replays may resolve.",
    )

    calls_max: int = setting(
        "NOETL_MAX_CALLS",
        "2000",
        _integer(1, 1_000_000),
        "Calls that are served at the same time; more are refused as overloaded.",
    )
    streams_max: int = setting(
        "NOETL_MAX_STREAMS",
        "2000",
        _integer(1, 1_000_000),
        "Streams that are open at the same time; more are refused as overloaded.",
    )

    drain_seconds: float = setting(
        "NOETL_DRAIN_SECS",
        "5",
        _seconds(0, 3600),
        "How long calls are still served after SIGTERM while health already says NOT_SERVING.",
    )
    grace_seconds: float = setting(
        "NOETL_GRACE_SECS", "30", _seconds(0, 3600), "How long running calls may take to finish after that."
    )
    log_level: str = setting(
        "NOETL_LOG_LEVEL",
        "info",
        _one_of("debug", "info", "warning", "error"),
        "Least severity that is logged.",
    )
    log_format: str = setting(
        "NOETL_LOG_FORMAT",
        "auto",
        _one_of("auto", "json", "text"),
        "JSON lines or text; auto is text on a terminal.",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Parse every variable; raises SettingsError on the first that can't be used."""
        settings = cls(
            **_parse(cls, env),
            event_stream=EventStreamSettings(**_parse(EventStreamSettings, env)),
            tracing=TracingSettings.from_env(env),
        )
        settings._check_together(env)
        if settings.shard_urls or settings.database_url or not env.get("POSTGRES_HOST"):
            return settings
        try:
            url = compose_database_url(
                host=env["POSTGRES_HOST"].strip(),
                port=env.get("POSTGRES_PORT", "5432").strip(),
                user=env.get("POSTGRES_USER", "noetl").strip(),
                password=env.get("POSTGRES_PASSWORD", ""),
                database=env.get("POSTGRES_DATABASE", "noetl").strip(),
            )
        except Rejected:
            raise SettingsError(
                "POSTGRES_HOST and POSTGRES_PORT do not make an address; expected a host name and a port"
            ) from None
        return replace(settings, database_url=url)

    def _check_together(self, env: Mapping[str, str]) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("NOETL_TLS_CERT and NOETL_TLS_KEY belong together; set both or neither")
        if self.tls_client_ca is not None and self.tls_key is None:
            raise SettingsError("NOETL_TLS_CLIENT_CA needs NOETL_TLS_CERT and NOETL_TLS_KEY")
        if self.pool_size_min > self.pool_size_max:
            raise SettingsError(
                "POSTGRES_MIN_CONNECTIONS is above POSTGRES_MAX_CONNECTIONS; expected at most that"
            )
        if self.event_stream.retention_seconds < self.event_stream.dedup_seconds:
            raise SettingsError(
                "NOETL_EVENT_STREAM_RETENTION_SECS is below NOETL_EVENT_STREAM_DEDUP_SECS; expected at least that"
            )
        if self.direct_urls and len(self.direct_urls) != max(1, len(self.shard_urls)):
            raise SettingsError("NOETL_DIRECT_DATABASE_URL must name as many databases as there are shards")
        if self.event_stream.enabled and not self.nats_url:
            raise SettingsError("NOETL_EVENT_STREAM_ENABLED needs NOETL_NATS_URL, such as nats://host:4222")

    @property
    def shards(self) -> tuple[str, ...]:
        """The shard databases in order; empty when none was named."""
        return self.shard_urls or ((self.database_url,) if self.database_url else ())

    @property
    def cluster(self) -> str:
        """The database of the catalog and the leases."""
        return self.cluster_url or (self.shards[0] if self.shards else "")

    @property
    def direct(self) -> tuple[str, ...]:
        """One URL per shard on which session locks work."""
        return self.direct_urls or self.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where a client finds its server, and how it is let in."""

    address: str = setting(
        "NOETL_GRPC_ADDRESS", "", _text, "host:port of the server; default 127.0.0.1:50051."
    )
    token: str = setting("NOETL_INTERNAL_API_TOKEN", "", _text, "The token to send.", secret=True)
    tls: bool = setting("NOETL_GRPC_TLS", "false", _flag, "Whether the server is reached by TLS.")
    tls_authorities: Path | None = setting(
        "NOETL_GRPC_TLS_CA",
        "",
        _file,
        "PEM authorities of the server's certificate; default the system's. Turns TLS on.",
    )
    tls_certificate: Path | None = setting(
        "NOETL_GRPC_TLS_CERT",
        "",
        _file,
        "PEM certificate of this client, for a server that asks for one. Turns TLS on.",
    )
    tls_key: Path | None = setting("NOETL_GRPC_TLS_KEY", "", _file, "PEM private key of this client.")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, *, folder: Path = Path()) -> ClientSettings:
        """What the environment says; where it is silent, what `noetl-grpc dev` running in the folder says."""
        settings = cls(**_parse(cls, env))
        if (settings.tls_certificate is None) != (settings.tls_key is None):
            raise SettingsError(
                "NOETL_GRPC_TLS_CERT and NOETL_GRPC_TLS_KEY belong together; set both or neither"
            )
        return settings.completed(folder)

    @property
    def uses_tls(self) -> bool:
        """Whether TLS is asked for, be it by naming one of its files."""
        return self.tls or any((self.tls_authorities, self.tls_certificate, self.tls_key))

    def completed(self, folder: Path = Path()) -> ClientSettings:
        """With the address and token of a development server filled in, but its token sent to nobody else."""
        running = _dev_server(folder / DEV_READY_FILE)
        address = self.address or running.get("address", DEFAULT_ADDRESS)
        token = self.token or (running.get("token", "") if address == running.get("address") else "")
        return replace(self, address=address, token=token)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker needs beside the server: the broker, and how to log."""

    nats_url: str = setting(
        "NOETL_NATS_URL", "", _broker_url, "The NATS servers, separated by commas.", secret=True
    )
    log_level: str = setting(
        "NOETL_LOG_LEVEL",
        "info",
        _one_of("debug", "info", "warning", "error"),
        "Least severity that is logged.",
    )
    log_format: str = setting(
        "NOETL_LOG_FORMAT",
        "auto",
        _one_of("auto", "json", "text"),
        "JSON lines or text; auto is text on a terminal.",
    )
    tracing: TracingSettings = field(default_factory=TracingSettings)

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] = os.environ, *, nats_url: str = "", folder: Path = Path()
    ) -> WorkerSettings:
        """The environment, where the argument is silent; else what `noetl-grpc dev` in the folder says."""
        settings = cls(**_parse(cls, {**env, "NOETL_NATS_URL": nats_url} if nats_url else env))
        url = settings.nats_url or _dev_server(folder / DEV_READY_FILE).get("nats_url", "")
        if not url:
            raise SettingsError("no broker is configured; set NOETL_NATS_URL, such as nats://host:4222")
        return replace(settings, nats_url=url, tracing=TracingSettings.from_env(env))


def _dev_server(ready_file: Path) -> dict[str, str]:
    try:
        document = json.loads(ready_file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {key: value for key, value in document.items() if isinstance(value, str)}


def _parse(cls: type, env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in fields(cls):
        if "env" not in item.metadata:
            continue
        name: str = item.metadata["env"]
        if name not in env:
            assert item.default is not MISSING
            continue
        try:
            values[item.name] = item.metadata["parse"](env[name])
        except Rejected as rejected:
            shown = "" if item.metadata["secret"] else f" {env[name]!r}"
            raise SettingsError(f"{name}{shown} can't be used; expected {rejected}") from None
    return values
