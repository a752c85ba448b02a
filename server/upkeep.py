"""What goes on beside the requests while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from server.gateway import Gateway
from server.tenants.keys import KeyFile
from server.tenants.limits import MemoryLimits
from server.watch import Watcher

logger = logging.getLogger("kvgate")

KEY_FILE_SECONDS = 1.0  # between two looks at the key file
LAST_WORD_SECONDS = 1.0  # for clients to take what they are told when the gateway ends before their answer


@asynccontextmanager
async def upkeep(gateway: Gateway) -> AsyncIterator[None]:
    """Finds and watches engines, sweeps deadlines, reloads keys; at the end it closes every connection."""
    await gateway.discovery.start()
    if gateway.ledger is not None:
        await gateway.ledger.start()
    watcher = Watcher(gateway)
    await watcher.start()
    if not isinstance(gateway.limits, MemoryLimits):
        await gateway.limits.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_anew, gateway)
    tasks = [asyncio.create_task(_sweep(gateway)), asyncio.create_task(_look_at_keys(gateway))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await gateway.discovery.stop()
        await watcher.stop()
        if gateway.ledger is not None:
            await gateway.ledger.stop()
        await _part(gateway)
        if not isinstance(gateway.limits, MemoryLimits):
            await gateway.limits.stop()
        gateway.replicas.close()
        await asyncio.to_thread(gateway.access_log.close)
        await asyncio.to_thread(gateway.tracer.close)


async def _sweep(gateway: Gateway) -> None:
    """Looks at every client connection a few times within the shortest time-out, twice a second otherwise."""
    s = gateway.settings
    shortest = min(
        s.queue_timeout,
        s.first_byte_timeout,
        s.idle_timeout,
        s.header_timeout,
        s.body_timeout,
        s.keep_alive_timeout,
        2.0,
    )
    while True:
        await asyncio.sleep(shortest / 4)
        now = monotonic()
        for connection in list(gateway.connections):
            try:
                connection.sweep(now)
            except Exception:  # a fault at one connection must not end the sweep of all others
                logger.exception("a fault in the gateway, please report it")
                connection.transport.abort()
        gateway.queues.expire(now)
        gateway.access_log.flush()


async def _part(gateway: Gateway) -> None:
    """Ends the connections that are left when the time to drain is over; whoever waits for an answer is told."""
    for connection in list(gateway.connections):
        connection.part(gateway.going())
    for _ in range(round(LAST_WORD_SECONDS / 0.01)):
        if not gateway.connections:
            break
        await asyncio.sleep(0.01)
    for connection in list(gateway.connections):
        connection.transport.abort()
    await asyncio.sleep(0)  # their ends are told, and leases given back, before what counts them stops


async def _look_at_keys(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(KEY_FILE_SECONDS)
        _reload_keys(gateway)


def _reload_keys(gateway: Gateway) -> None:
    keys = gateway.keys
    if isinstance(keys, KeyFile) and keys.reload_if_changed() and isinstance(gateway.limits, MemoryLimits):
        gateway.limits.reload()


def _read_anew(gateway: Gateway) -> None:
    """On SIGHUP: the access log's file and the keys, at once."""
    gateway.access_log.reopen()
    _reload_keys(gateway)
