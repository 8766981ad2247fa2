"""The configuration of the model that vLLM's tests name, in the current directory: no hub can be reached."""

import os
from pathlib import Path

for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}.items():
    os.environ.setdefault(name, value)

if not Path("facebook/opt-125m").exists():
    from transformers import OPTConfig

    OPTConfig(architectures=["OPTForCausalLM"], bos_token_id=2).save_pretrained("facebook/opt-125m")
