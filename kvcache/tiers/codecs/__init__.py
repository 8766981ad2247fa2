"""Codecs encode blocks for tiers: `base` is the interface, `stage` runs a codec in the I/O threads."""
