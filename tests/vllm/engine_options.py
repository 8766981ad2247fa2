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


def transfer_config(extra_config: dict[str, Any]) -> dict[str, Any]:
    """Return the connector's configuration over our spec, unless `extra_config` names another one."""
    spec = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": spec | {"cpu_bytes_to_use": 256 << 20} | extra_config,
    }
