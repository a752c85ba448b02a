"""How a simulated engine loses a connection."""

from __future__ import annotations

import asyncio
import socket
import struct


def reset(transport: asyncio.BaseTransport) -> None:
    """Close with a TCP reset, whatever is still to be sent."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(transport, asyncio.Transport):
        transport.abort()
    else:
        transport.close()
