"""nginx configurations: the proxy that is measured, and the upstream that answers at once. Never a system service."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from bench import payloads
from bench.debian import program
from bench.process import LOOPBACK

FOREVER = "100000000"


def command(prefix: Path, configuration: str) -> list[str]:
    """The foreground command; everything that nginx writes stays below `prefix`."""
    path = prefix / "nginx.conf"
    path.write_text(configuration)
    return [program("nginx"), "-p", str(prefix), "-c", str(path), "-e", str(prefix / "error.log")]


def proxy(prefix: Path, port: int, upstreams: Sequence[int]) -> str:
    """The plainest fair proxy for streams: one worker, the upstreams' ports in turn, kept-alive connections, no buffering."""
    servers = "\n".join(f"        server {LOOPBACK}:{port};" for port in upstreams)
    http = f"""
    upstream engine {{
{servers}
        keepalive 512;
        keepalive_requests {FOREVER};
        keepalive_timeout 1h;
    }}
    server {{
        listen {LOOPBACK}:{port} backlog=1024;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
"""
    return _configuration(prefix, http)


def upstream(prefix: Path, port: int) -> str:
    """Answers every chat request with the same bytes, and counts requests at /stub_status.

    The header buffer takes head and body of a whole request in one read: `return` does not wait for a body, and would
    otherwise answer while the gateway still sends, which no engine does.
    """
    http = f"""
    client_header_buffer_size 64k;
    default_type application/json;
    server {{
        listen {LOOPBACK}:{port} backlog=1024;
        location = {payloads.CHAT} {{ return 200 '{payloads.answer().decode()}'; }}
        location = /health {{ return 200 ''; }}
        location = /version {{ return 200 '{{"version":"0.32.0"}}'; }}
        location = /v1/models {{ return 200 '{payloads.models().decode()}'; }}
        location = /metrics {{ default_type "text/plain; version=0.0.4"; return 200 '{payloads.metrics().decode()}'; }}
        location = /stub_status {{ stub_status; }}
    }}
"""
    return _configuration(prefix, http)


def _configuration(prefix: Path, http: str) -> str:
    user = ""
    if os.geteuid() == 0:  # a root master would drop to www-data, which cannot enter a private temporary folder
        user = f"user {pwd.getpwuid(os.getuid()).pw_name} {grp.getgrgid(os.getgid()).gr_name};"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"    {kind}_temp_path {prefix}/{kind};" for kind in kinds)
    return f"""{user}
daemon off;
worker_processes 1;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log warn;
events {{ worker_connections 4096; }}
http {{
{temporary}
    access_log off;
    keepalive_requests {FOREVER};
    keepalive_timeout 1h;
    tcp_nodelay on;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
{http}}}
"""
