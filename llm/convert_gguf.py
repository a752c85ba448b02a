"""A script for the engine's Python: a GGUF model file to a bf16 safetensors folder, which vLLM can load.

    python convert_gguf.py PACKAGE TARGET

PACKAGE: an installed package that carries exactly one .gguf file. TARGET: an existing, empty folder.
vLLM reads no GGUF on a CPU, so the weights are dequantised once. Needs torch, transformers, gguf and accelerate, which
only the engine's environment has; kvgate itself never imports this module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def gguf_file(package: str) -> Path:
    """Found without importing the package, whose own imports are not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {package} is not installed beside {sys.executable}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"the package {package} carries {len(files)} .gguf files where one is needed")
    return files[0]


def convert(source: Path, target: Path) -> None:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # type: ignore[import-not-found]

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).to(torch.bfloat16)
    # the weights are plain bf16 from here on; what is left of this would make vLLM look for a GGUF loader
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(gguf_file(sys.argv[1]), Path(sys.argv[2]))
