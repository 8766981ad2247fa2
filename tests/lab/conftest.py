"""A trace that a test makes of the blocks of its requests."""

import json

import pytest


@pytest.fixture
def write_trace(tmp_path):
    """Write a Mooncake trace of requests, which arrive one after the other, and return its path."""

    def write(requests, step_ms=1):
        path = tmp_path / "trace.jsonl"
        lines = [
            {"timestamp": step_ms * i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            for i, ids in enumerate(requests)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write
