"""`kvcache bench tier` measures a tier in turns with its medium's client."""

import json

import pytest

from kvcache.lab.bench.servers import find_valkey, running_valkey

pytest.importorskip("typer")


@pytest.mark.parametrize("codec", [None, {"type": "fp8", "dtype": "bfloat16"}])
def test_tier_without_a_client_of_its_own_is_measured_alone(run, codec):
    entry = json.dumps({"type": "memory", "capacity": "64MiB", "codec": codec})
    status, out, err = run(
        "bench", "tier", entry, "--block-bytes", "64KiB", "--size", "1MiB", "--rounds", "2", "--json", "-"
    )
    assert (status, err) == (0, "")
    rates = json.loads(out)
    assert (rates["num_blocks"], rates["num_rounds"], rates["block_bytes"]) == (16, 2, 1 << 16)
    assert rates["store_bytes_per_s"] > 0
    assert rates["load_bytes_per_s"] > 0
    assert (rates["plain_store_bytes_per_s"], rates["plain_load_bytes_per_s"]) == (0, 0)


def test_valkey_is_measured_in_turns_with_its_client_and_left_as_it_was(run):
    if find_valkey() is None:
        pytest.skip("needs valkey-server or redis-server")
    with running_valkey() as port:
        entry = json.dumps({"type": "valkey", "url": f"valkey://127.0.0.1:{port}"})
        status, out, _ = run("bench", "tier", entry, "--block-bytes", "64KiB", "--size", "1MiB", "--rounds", "2")
        assert status == 0
        assert "plain client loop" in out
        from valkey import Valkey

        with Valkey(port=port) as client:
            assert [name for name in client.scan_iter() if not name.endswith(b":epoch")] == []
