"""How the small engines of these tests are made, whatever process they run in."""

from typing import Any

BLOCK_BYTES = 2 * 4 * 4 * 32 * 4 * 32
"""Of one block of the small models: keys and values of 4 layers, 4 heads of 32 floats, 32 tokens."""
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 128,
    # In bfloat16 the engine's own tokens depend on how requests are batched.
    "dtype": "float32",
    "max_model_len": 2048,
    "disable_log_stats": False,
    "seed": 0,
}
