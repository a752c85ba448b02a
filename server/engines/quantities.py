"""Amounts of memory and tokens as people write them."""

from __future__ import annotations

import re

from kvgate.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
_UNITS = {
    "": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str, source: str) -> int:
    """ "1GiB", "512MiB", "1.5 GB" or plain bytes, as a positive number of bytes. `source` names the flag in the error."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{source} {text}: give an amount with its unit, such as 1GiB or 512MiB")
    amount = int(float(match[1]) * unit)
    if amount < MIB:
        raise UsageError(f"{source} {text}: less than 1 MiB holds no KV block, give an amount such as 1GiB")
    return amount


def parse_tokens(text: str, source: str) -> int:
    """A positive whole number of tokens."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{source} {text}: give a positive whole number of tokens")
    return int(text)
