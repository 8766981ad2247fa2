"""The base of codecs, under its public path; it lies in `kvcache.tiers.base.codec`."""

from kvcache.tiers.base.codec import CannotEncodeError, Codec

__all__ = ["CannotEncodeError", "Codec"]
