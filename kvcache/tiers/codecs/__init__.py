"""Codecs encode blocks for tiers; `kvcache.tiering.codec` is their interface."""
