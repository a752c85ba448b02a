"""Runs the gateway until a signal ends it."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import signal
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType

import uvicorn

from kvgate.errors import SetupError, UsageError
from kvgate.settings import Settings
from server.access_log import AccessLog
from server.app import create_app
from server.exchange.protocol import ClientConnection
from server.gateway import Gateway

_LEVELS = ("debug", "info", "warning", "error")
LAST_REQUEST_SECONDS = 1.0  # that an idle connection stays for a request that is under way when the listeners close


class Server(uvicorn.Server):
    """uvicorn's server, which drains on the first SIGTERM or SIGINT and ends with exit code 0 after it.

    First, for `drain_delay`, it goes on as before, but is not ready, and each answer says `connection: close`. Then it closes
    the listeners and finishes what runs. A connection is closed where an answer said so or where it is idle, never under
    a request.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._delayed_until = float("inf")  # monotonic seconds: when the listeners close

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        delay = self._gateway.settings.drain_delay
        if self.started and delay and not self._gateway.draining:
            self._delayed_until = monotonic() + delay
        else:
            super().handle_exit(sig, frame)
        self._gateway.draining = True

    async def on_tick(self, counter: int) -> bool:
        if monotonic() >= self._delayed_until:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: object = None) -> None:
        self._gateway.idle_seconds = min(LAST_REQUEST_SECONDS, self._gateway.idle_seconds)
        await super().shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that led to an orderly end is not raised once more."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def startup(self, sockets: object = None) -> None:
        await super().startup()
        # The cyclic collector takes 10 % of a busy gateway's CPU and makes its p99; requests are freed by reference count
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 1000)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        shown = f"[{host}]" if ":" in host else host
        print(f"kvgate listens on {scheme}://{shown}:{port}", file=sys.stderr, flush=True)  # noqa: T201  what `serve` tells its user


def configure(gateway: Gateway) -> uvicorn.Config:
    """uvicorn with the gateway's protocol in place of its own."""
    settings = gateway.settings
    return uvicorn.Config(
        create_app(gateway),
        host=settings.host,
        port=settings.port,
        http=functools.partial(ClientConnection, gateway),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
    )


def check_tls(settings: Settings) -> None:
    """Raises UsageError unless certificate and key are both given and fit, or neither is given."""
    if not settings.tls_cert and not settings.tls_key:
        return
    if not settings.tls_cert or not settings.tls_key:
        raise UsageError("--tls-cert and --tls-key go together")
    for flag, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise UsageError(f"{flag} {path} cannot be read: {error.strerror or error}") from None
    try:
        no_prompt = ""  # where a key has a passphrase, OpenSSL would ask for it at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, no_prompt)
    except ssl.SSLError as error:
        raise UsageError(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} are not a certificate and its key, both in PEM "
            f"and without a passphrase ({error.reason or error})"
        ) from None


def check_settings(settings: Settings) -> None:
    """Raises UsageError for a setting with which the gateway would not start, whatever its engines are."""
    _build(replace(settings, access_log="off"), ["http://127.0.0.1:1"])
    AccessLog(settings.access_log).close()


def _build(settings: Settings, engines: list[str]) -> Gateway:
    if settings.log_level not in _LEVELS:
        raise UsageError(f"--log-level {settings.log_level!r} is not one of {', '.join(_LEVELS)}")
    check_tls(settings)
    return Gateway.build(settings, engines)


def run_gateway(settings: Settings, engines: list[str]) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests finish within `drain_timeout`. 0 after an orderly end.

    Raises UsageError for a bad setting and SetupError where the port cannot be had.
    """
    gateway = _build(settings, engines)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # uvicorn's own lines carry request targets, whose query strings users type into
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    server = Server(configure(gateway), gateway)
    try:
        server.run()
    except SystemExit as error:  # uvicorn's way to say that it could not start; the cause is on stderr
        raise SetupError(
            f"the gateway could not start on {settings.host}:{settings.port} (is the port taken?)"
        ) from error
    return 0
