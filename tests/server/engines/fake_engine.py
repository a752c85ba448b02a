"""A stand-in for vLLM's process, for tests of how engines are started and stopped.

    python fake_engine.py PORT BEHAVIOUR

serve: answers /health and /v1/models, with a child process beside it as vLLM has. slow: the same after half a second.
deaf: as serve, and ignores SIGTERM, its child too. other-model: serves a model of another name. locked: asks for a key.
die: writes a log as vLLM's and exits with 3. silent: never listens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

VLLM_FAILURE = """(APIServer pid=1) INFO 11-29 23:26:13 [utils.py:1] non-default args: {}
(EngineCore pid=2) ERROR 11-29 23:26:13 [core.py:1510] ValueError: the cause, far from the end
(EngineCore pid=2) Traceback (most recent call last):
ValueError: the cause, far from the end
"""


def main(port: int, behaviour: str) -> None:
    if behaviour == "die":
        print(VLLM_FAILURE, end="")
        for number in range(40):
            print(f"traceback line {number}")
        sys.exit(3)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(
        f"engine {os.getpid()} child {child.pid} TOKEN={os.environ.get('FAKE_TOKEN')} FLAG={os.environ.get('FAKE_FLAG')}",
        flush=True,
    )
    if behaviour == "silent":
        time.sleep(600)
    if behaviour == "slow":
        print("Starting to load model", flush=True)
        time.sleep(0.5)
    model = "another" if behaviour == "other-model" else "smollm2"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            locked = behaviour == "locked" and self.path.startswith("/v1")
            self.send_response(401 if locked else 200)
            self.end_headers()
            if self.path == "/v1/models":
                self.wfile.write(json.dumps({"data": [{"id": model}]}).encode())

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
