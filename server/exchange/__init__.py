"""One proxied request, from the first byte of the client to the last byte of the engine, at the level of HTTP."""
