"""Codecs encode blocks for tiers; `kvcache.tiers.base.codec` is their interface."""
