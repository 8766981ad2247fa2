"""The base of codecs, under a second path; it is defined in `kvcache.tiers.base.codec`."""

from kvcache.tiers.base.codec import CannotEncodeError, Codec

__all__ = ["CannotEncodeError", "Codec"]
