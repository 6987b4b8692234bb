"""TLS credentials that follow their files: a renewed certificate is used from the next handshake on."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from threading import Lock
from typing import Any

import grpc

from noetl_grpc.errors import SettingsError

logger = logging.getLogger("noetl_grpc.tls")

#: How often the files are looked at, at most.
LOOK_SECONDS = 1.0

_BEGIN = b"-----BEGIN "


class Certificates:
    """The key, its certificate chain and the authorities of the clients, as gRPC asks for them."""

    def __init__(self, *, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._files = (key, certificate, *((client_ca,) if client_ca else ()))
        # gRPC asks from threads of its own.
        self._lock = Lock()
        self._look_at = 0.0
        self._read: tuple[bytes, ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        """What a secure port is opened with."""
        try:
            first = self._renewed()
        except (OSError, ValueError) as error:
            raise SettingsError(f"the TLS files can't be used: {error}") from None
        assert first is not None
        fetch: Any = self._fetch  # it may answer None, which the types do not know
        return grpc.dynamic_ssl_server_credentials(
            first, fetch, require_client_authentication=len(self._files) > 2
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; None is to go on with what there is."""
        with self._lock:
            now = time.monotonic()
            if now < self._look_at:
                return None
            self._look_at = now + LOOK_SECONDS
            try:
                renewed = self._renewed()
            except (OSError, ValueError) as error:
                # Between the new certificate and the new key they may not fit; the next handshake looks again.
                logger.error("the TLS files can't be used, the last good ones stay: %s", error)
                return None
            if renewed is not None:
                logger.info("the TLS files have changed and are used from now on")
            return renewed

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        read = tuple(file.read_bytes() for file in self._files)
        if read == self._read:
            return None
        for file, content in zip(self._files, read, strict=True):
            if _BEGIN not in content:
                raise ValueError(f"{file.name} holds no PEM")
        _require_fit(*self._files[:2])
        self._read = read
        key, chain, *client_ca = read
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=client_ca[0] if client_ca else None
        )


def _require_fit(key: Path, certificate: Path) -> None:
    """gRPC would take a key that is not the certificate's and fail every handshake without a word.

    The empty password keeps an encrypted key from asking for one on the terminal.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"{key.name} and {certificate.name} do not fit ({error.reason or 'not PEM'})"
        ) from None
