"""Replay the calls of a recording, compare the answers, and shrink the calls that show a difference."""
