"""What an engine's metrics page says of the size of its cache."""

from __future__ import annotations

import pytest

from server.watch import kv_shape
from tests.fakes.answers import metrics
from tests.fakes.engine import FakeEngine


def line(labels: str) -> bytes:
    return b"\n# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{%b} 1.0\nvllm:other 2.0\n" % labels.encode()


@pytest.mark.parametrize(
    ("page", "shape"),
    [
        (line('block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1456"'), (1456, 32)),
        (line('num_gpu_blocks_override="7",num_gpu_blocks="9",user_specified_block_size="1",block_size="16"'), (9, 16)),
        (line('block_size="16",kv_cache_dtype_skip_layers="{1} 1.0",num_gpu_blocks="5"'), (5, 16)),
        (line('block_size="None",num_gpu_blocks="None"'), (None, None)),
        (line('block_size="16",num_gpu_blocks="0"'), (None, 16)),
        (line('num_gpu_blocks="8",engine="0"') + line('num_gpu_blocks="8",engine="1"'), (8, None)),  # the sum, in each
        (b"\nvllm:other 1.0\n", (None, None)),
        (b"", (None, None)),
    ],
)
def test_blocks_and_their_size(page: bytes, shape: tuple[int | None, int | None]) -> None:
    assert kv_shape(page) == shape


def test_a_whole_page() -> None:
    assert kv_shape(b"\n" + metrics(FakeEngine()).encode()) == (1000, 32)
