"""For the engine's Python: vLLM's own scheduler and block pool, without a model, driven by a script of actions.

    python vllm_scheduler.py MODEL_FOLDER < scenarios.jsonl

A line is a scenario, `{"block_size", "blocks", "max_model_len", "budget", "seqs", "actions": [...]}`; an action is
["add", id, tokens, max_tokens, salt, lora], ["step", [ids aborted while it runs]] or ["reset", with running requests].
Prints a line for each scenario: a JSON list with a result for each action but "add".
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch  # type: ignore[import-not-found]
from vllm.config import (  # type: ignore[import-not-found]
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
from vllm.v1.request import Request, RequestStatus  # type: ignore[import-not-found]
from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]


class Publisher:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        pass

    def get_publisher_config(self) -> None:
        return None


def build(folder: str, asked: dict[str, Any]) -> Scheduler:
    size, length = asked["block_size"], asked["max_model_len"]
    config = VllmConfig(
        model_config=ModelConfig(model=folder, dtype="float32", max_model_len=length),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=asked["seqs"],
            max_num_batched_tokens=asked["budget"],
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.cache_config.block_size = size
    config.cache_config.num_gpu_blocks = asked["blocks"]
    config.scheduler_config.max_num_batched_tokens = asked["budget"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=asked["blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=size, log_stats=True)


def request(action: list[Any], hasher: Any) -> Request:
    _, name, tokens, output, salt, lora = action
    parameters = SamplingParams(max_tokens=output, ignore_eos=True)
    adapter = LoRARequest(lora[0], lora[2], lora[1]) if lora else None
    return Request(name, tokens, parameters, None, cache_salt=salt, lora_request=adapter, block_hasher=hasher)


def step(scheduler: Scheduler, publisher: Publisher, aborted: list[str]) -> dict[str, Any]:
    plan = scheduler.schedule()
    sampled = []
    for name in plan.num_scheduled_tokens:
        one = scheduler.requests[name]
        done = one.num_computed_tokens == one.num_tokens
        sampled.append([1000 + one.num_tokens] if done else [])
    for name in aborted:
        if name in scheduler.requests:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    names = list(plan.num_scheduled_tokens)
    result = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
    outputs = scheduler.update_from_output(plan, result)
    tokens = []
    for batch in outputs.values():
        for output in batch.outputs:
            first = output.prefill_stats
            stats = [first.num_cached_tokens, first.num_cache_creation_tokens] if first else None
            finish = str(output.finish_reason) if output.finish_reason is not None else None
            tokens.append([output.request_id, list(output.new_token_ids), stats, finish])
    events, publisher.events = publisher.events, []
    return {
        "chunks": list(plan.num_scheduled_tokens.items()),
        "outputs": tokens,
        "events": [show(event) for event in events],
        "usage": scheduler.kv_cache_manager.usage,
    }


def show(event: Any) -> list[Any]:
    kind = type(event).__name__
    if kind == "BlockStored":
        return [
            kind,
            event.block_hashes,
            event.parent_block_hash,
            list(event.token_ids),
            event.block_size,
            event.lora_name,
            event.extra_keys,
        ]
    return [kind, event.block_hashes] if kind == "BlockRemoved" else [kind]


def play(folder: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    scheduler = build(folder, asked)
    publisher = scheduler.kv_event_publisher = Publisher()
    hasher = get_request_block_hasher(asked["block_size"], sha256)
    results: list[dict[str, Any]] = []
    for action in asked["actions"]:
        if action[0] == "add":
            scheduler.add_request(request(action, hasher))
        elif action[0] == "step":
            results.append(step(scheduler, publisher, action[1]))
        else:
            results.append({"reset": scheduler.reset_prefix_cache(reset_running_requests=action[1])})
    return results


def main() -> None:
    init_none_hash(sha256)
    for line in sys.stdin:
        print(json.dumps(play(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
