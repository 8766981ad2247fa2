"""Simulate many engines behind a router over one shared store."""
