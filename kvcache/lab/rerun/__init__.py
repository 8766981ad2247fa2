"""Replay the calls of a recording, and compare the answers."""
