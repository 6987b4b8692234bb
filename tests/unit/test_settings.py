from pathlib import Path

import pytest

from noetl_grpc.errors import SettingsError
from noetl_grpc.settings import Settings, WorkerSettings


def test_defaults_are_those_of_the_documentation() -> None:
    settings = Settings.from_env({})

    assert settings == Settings()
    assert (settings.grpc_host, settings.grpc_port) == ("0.0.0.0", 50051)
    assert settings.metrics_address == ("0.0.0.0", 9464)
    assert settings.event_stream.poll_ms == 10
    assert settings.event_stream.retention_seconds == 86_400
    assert settings.shards == ()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("NOETL_GRPC_PORT", "99999", "from 0 to 65535"),
        ("NOETL_GRPC_PORT", "", "from 0 to 65535"),
        ("NOETL_GRPC_PORT", "50051.0", "from 0 to 65535"),
        ("NOETL_DATABASE_URL", "mysql://h/db", "postgresql://"),
        ("NOETL_DATABASE_URL", "postgresql://h:port/db", "postgresql://"),
        ("NOETL_DATABASE_URL", "postgresql:///db", "postgresql://"),
        ("NOETL_SHARDS", "postgresql://a/x,nonsense", "entry 1"),
        ("NOETL_SHARDS", "postgresql://a/x,,postgresql://b/x", "entry 1"),
        ("NOETL_SHARDS", "host=a;user=u,host=b;colour=red;user=u", "entry 1"),
        ("NOETL_API_TOKENS_FILE", "/nowhere/tokens.json", "a file that can be read"),
        ("NOETL_SERVER_MACHINE_ID", "1024", "from 0 to 1023"),
        ("NOETL_EVENT_STREAM_ENABLED", "maybe", "true, 1, yes, on"),
        ("NOETL_EVENT_STREAM_BATCH", "0", "from 1 to 10000"),
        ("NOETL_EVENT_STREAM_POLL_MS", "60001", "from 1 to 60000"),
        ("NOETL_METRICS_ADDR", "9464", "host:port"),
        ("NOETL_NATS_URL", "http://h", "nats://"),
        ("NOETL_LOG_LEVEL", "loud", "debug, info"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@collector:4317", "http://host:port"),
        ("OTEL_SDK_DISABLED", "perhaps", "true, 1, yes, on"),
    ],
)
def test_a_value_that_can_not_be_used_is_named_with_what_is_accepted(
    name: str, value: str, accepted: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_env({name: value})

    assert name in str(raised.value)
    assert accepted in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_secret_is_neither_shown_in_an_error_nor_in_the_settings() -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_env({"NOETL_DATABASE_URL": "postgresql://u:s3cret@h:x/db"})
    settings = Settings.from_env(
        {"NOETL_DATABASE_URL": "postgresql://u:s3cret@h/db", "NOETL_INTERNAL_API_TOKEN": "s3cret"}
    )

    assert "s3cret" not in str(raised.value)
    assert "s3cret" not in repr(settings)


def test_credentials_in_the_collectors_address_are_refused_without_showing_them() -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://u:s3cret@h:4317"})

    assert "s3cret" not in str(raised.value)


def test_shards_may_be_written_in_the_form_of_noetl() -> None:
    settings = Settings.from_env(
        {
            "NOETL_SHARDS": "host=a;user=u;password=p@:/w;dbname=d, postgresql://u@b:6000/e",
            "NOETL_CLUSTER_DSN": "",
        }
    )

    assert settings.shards == ("postgresql://u:p%40%3A%2Fw@a:5432/d", "postgresql://u@b:6000/e")
    assert settings.cluster == settings.shards[0]


def test_the_parts_of_one_database_make_its_url() -> None:
    settings = Settings.from_env({"POSTGRES_HOST": "db", "POSTGRES_USER": "u", "POSTGRES_PASSWORD": "p w"})

    assert settings.shards == ("postgresql://u:p%20w@db:5432/noetl",)


@pytest.mark.parametrize(
    "env",
    [
        {"NOETL_EVENT_STREAM_RETENTION_SECS": "60"},
        {"NOETL_EVENT_STREAM_ENABLED": "true"},
        {"POSTGRES_MIN_CONNECTIONS": "11"},
        {
            "NOETL_DIRECT_DATABASE_URL": "postgresql://a/x,postgresql://b/x",
            "NOETL_DATABASE_URL": "postgresql://a/x",
        },
        {"POSTGRES_HOST": "db", "POSTGRES_PORT": "many"},
    ],
)
def test_values_that_contradict_each_other_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(SettingsError):
        Settings.from_env(env)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")

    with pytest.raises(SettingsError, match="belong together"):
        Settings.from_env({"NOETL_TLS_CERT": str(tmp_path / "cert.pem")})


@pytest.mark.parametrize(
    ("text", "value"), [(" On ", True), ("1", True), ("yes", True), ("", False), ("NO", False)]
)
def test_flags_are_read_without_case(text: str, value: bool) -> None:
    assert Settings.from_env({"NOETL_REFLECTION": text}).reflection is value


@pytest.mark.parametrize(
    ("env", "endpoint"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://t:4317",
            },
            "https://t:4317",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        # Meant for others on the same machine.
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_TRACES_EXPORTER": "zipkin"}, ""),
    ],
)
def test_naming_a_collector_turns_tracing_on(env: dict[str, str], endpoint: str) -> None:
    worker = WorkerSettings.from_env({**env, "NOETL_NATS_URL": "nats://h"})

    assert Settings.from_env(env).tracing.endpoint == endpoint
    assert Settings.from_env({**env, "POSTGRES_HOST": "db"}).tracing.endpoint == endpoint
    assert worker.tracing.endpoint == endpoint


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "grpc"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp"),
    ],
)
def test_a_collector_that_can_not_be_spoken_to_is_refused(name: str, value: str, accepted: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} '{value}' can't be used; expected {accepted}$"):
        Settings.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", name: value})
