"""The base of codecs, under its public path; it lies in `kvcache.tiering.codec`."""

from kvcache.tiering.codec import CannotEncodeError, Codec

__all__ = ["CannotEncodeError", "Codec"]
