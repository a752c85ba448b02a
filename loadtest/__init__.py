"""The load test. It speaks to a gateway or an engine over HTTP only."""
