"""Codecs: blocks made smaller on their way to a tier. `base` says what a codec must do; `tier` wraps any tier."""
