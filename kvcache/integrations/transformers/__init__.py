"""Keep the KV data of transformers models' prompts in host memory, and give it back to later prompts."""

from kvcache.integrations.transformers.cache import PrefixCache, PrefixCacheStats

__all__ = ["PrefixCache", "PrefixCacheStats"]
