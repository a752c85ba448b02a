"""vLLM's own parser takes the command of a GPU's engine, which cannot run here."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

from server.engines.local import engine_python
from server.engines.profiles import EngineSpec, EventEndpoints, engine_command

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
names = ("model_tag", "served_model_name", "port", "max_model_len", "kv_cache_memory_bytes", "block_size", "kv_cache_dtype",
         "enable_prefix_caching", "enable_prompt_tokens_details")
events = args["kv_events_config"]
print(json.dumps({name: args[name] for name in names} | {"publish": events.endpoint, "replay": events.replay_endpoint}))
"""


def test_vllm_understands_the_command_of_the_gpu_profile() -> None:
    spec = EngineSpec(
        profile="gpu", model="org/name", served_name="name", port=8001, events=EventEndpoints.on_ports(5557)
    )
    spec = replace(spec, max_model_len=4096, kv_bytes=2**34, block_size=16, kv_dtype="fp8")
    program, subcommand, *arguments = engine_command(spec, "vllm").argv
    assert (program, subcommand) == ("vllm", "serve")
    done = subprocess.run(
        [engine_python(os.environ), "-c", PARSE, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert spec.events is not None
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "model_tag": "org/name",
        "served_model_name": ["name"],
        "port": 8001,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 2**34,
        "block_size": 16,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "publish": spec.events.publish,
        "replay": spec.events.replay,
    }
