"""How long a step takes, and how much KV memory there is: given by hand, from a roofline, or fitted to an engine.

A step reads the weights and the KV of its sequences once, and computes its tokens. It takes the longer of the two, plus a
fixed cost. A roofline takes both from data sheets and a share of the peak that good kernels reach: an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from loadtest.sim.scheduler import Chunk

GIB = 1 << 30
COMPUTE_SHARE = 0.55  # of the data sheet's dense FLOP/s that prefill reaches
BANDWIDTH_SHARE = 0.75  # of the data sheet's bytes/s that decode reaches
MEMORY_SHARE = 0.92  # vLLM's --gpu-memory-utilization
ACTIVATION_BYTES = 2 * GIB

Kind = Literal["given", "estimate", "measured"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds. step_s: each step. weights_s: at least this for a step's memory traffic. kv_s: for each token of context
    read. token_s: for each token computed. attention_s: for each pair of a computed token and a token before it.
    """

    name: str
    kind: Kind
    weights_s: float
    token_s: float
    step_s: float = 0.0
    kv_s: float = 0.0
    attention_s: float = 0.0
    kv_tokens: int | None = None
    block_size: int | None = None
    max_batched_tokens: int | None = None
    max_seqs: int | None = None

    def at(self, prefill_tokens_per_s: float | None, decode_s: float | None) -> Profile:
        """With these set by hand."""
        if prefill_tokens_per_s is None and decode_s is None:
            return self
        return replace(
            self,
            kind="given",
            token_s=self.token_s if prefill_tokens_per_s is None else 1 / prefill_tokens_per_s,
            weights_s=self.weights_s if decode_s is None else decode_s,
        )

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """How long a step with these chunks takes; 0 for none."""
        tokens = pairs = context = 0
        for chunk in chunks:
            tokens += chunk.tokens
            context += chunk.start + chunk.tokens
            pairs += chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) // 2
        if not tokens:
            return 0.0
        memory = self.weights_s + self.kv_s * context
        compute = self.token_s * tokens + self.attention_s * pairs
        return self.step_s + max(memory, compute)


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: dense bf16 per second. bandwidth: bytes per second. memory: bytes. All from the maker's data sheet."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder in bf16. hidden: query heads × head size."""

    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    hidden: int

    @property
    def kv_bytes(self) -> int:
        """For each token."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


GPUS = {
    "a10g": Gpu(70e12, 0.6e12, 24e9),
    "l4": Gpu(121e12, 0.3e12, 24e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9),
    "rtx4090": Gpu(165e12, 1.008e12, 24e9),
    "a100": Gpu(312e12, 2.039e12, 80e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
}
MODELS = {
    "smollm2-135m": Model(0.135e9, 30, 3, 64, 576),
    "qwen2.5-7b": Model(7.62e9, 28, 4, 128, 3584),
    "llama-3.1-8b": Model(8.03e9, 32, 8, 128, 4096),
    "qwen3-8b": Model(8.19e9, 36, 8, 128, 4096),
    "qwen3-14b": Model(14.8e9, 40, 8, 128, 5120),
    "qwen3-32b": Model(32.8e9, 64, 8, 128, 8192),
}


def roofline(gpu_name: str, model_name: str) -> Profile:
    """An estimate for one GPU. Raises ValueError where the model does not fit."""
    gpu, model = GPUS[gpu_name], MODELS[model_name]
    weights = 2 * model.parameters
    kv_bytes = gpu.memory * MEMORY_SHARE - weights - ACTIVATION_BYTES
    if kv_bytes < 4096 * model.kv_bytes:
        raise ValueError(f"{model_name} does not fit in the memory of one {gpu_name}")
    flops, bandwidth = gpu.flops * COMPUTE_SHARE, gpu.bandwidth * BANDWIDTH_SHARE
    return Profile(
        name=f"{gpu_name}:{model_name}",
        kind="estimate",
        weights_s=weights / bandwidth,
        token_s=2 * model.parameters / flops,
        step_s=0.001,
        kv_s=model.kv_bytes / bandwidth,
        attention_s=4 * model.layers * model.hidden / flops,
        kv_tokens=int(kv_bytes / model.kv_bytes),
        block_size=16,
        max_batched_tokens=8192,
        max_seqs=256,
    )


def given(prefill_tokens_per_s: float, decode_s: float) -> Profile:
    """As the two numbers say: a prompt is computed at so many tokens a second, a step without prompts takes decode_s."""
    return Profile("given", "given", weights_s=decode_s, token_s=1 / prefill_tokens_per_s)


def presets() -> dict[str, Profile]:
    """By name, those for which the model fits."""
    found = {CPU.name: CPU}
    for gpu in GPUS:
        for model in MODELS:
            try:
                found[f"{gpu}:{model}"] = roofline(gpu, model)
            except ValueError:
                continue
    return found


CPU = Profile(
    "cpu:smollm2",
    "measured",
    weights_s=0.024,
    token_s=0.00066,
    kv_tokens=46_592,
    block_size=32,
    max_batched_tokens=2048,
    max_seqs=128,
)
