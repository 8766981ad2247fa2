"""Keep keys and values of transformers models in host memory and reuse them for later prompts."""

from kvcache.integrations.transformers.cache import PrefixCache, PrefixCacheStats

__all__ = ["PrefixCache", "PrefixCacheStats"]
