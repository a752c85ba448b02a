"""The KV-cache domain: pure functions and values, without network, disk, asyncio or a framework."""
