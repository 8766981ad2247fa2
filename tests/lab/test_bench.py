"""`kvcache bench copy` measures every way in one run, `kvcache bench tier` a tier in turns with its client."""

import itertools
import json

import pytest

pytest.importorskip("typer")

from servers import find_valkey, running_valkey

from kvcache.lab.bench.copy import CopyBench


@pytest.mark.slow
def test_every_way_is_measured_both_directions(run):
    options = ("--sizes", "4KiB,16KiB", "--blocks", "20", "--repeats", "1", "--json", "-")
    status, out, err = run("bench", "copy", *options)
    assert status == 0
    rates = json.loads(out)["rates"]
    own = {"kvcache, 1 thread", "kvcache, 2 threads"}
    assert {rate["way"] for rate in rates} == own | {"one large copy", "torch copy_ per block", "torch index_select"}
    columns = {(rate["direction"], rate["layout"]) for rate in rates}
    assert columns == set(itertools.product(("store", "load"), ("scattered", "contiguous")))
    assert len(rates) == 2 * len(columns) * 5
    for rate in rates:
        assert rate["gb_per_s"] == pytest.approx(rate["num_blocks"] * rate["block_bytes"] / rate["seconds"] / 1e9)
        assert rate["way"] != "one large copy" or rate["ratio"] == 1
    assert "kvcache, 2 threads" in err


def test_all_ways_move_the_same_bytes():
    for direction in ("store", "load"):
        for name in CopyBench(512, 20).ways(direction, "scattered"):
            bench = CopyBench(512, 20)
            sides = list(zip((bench._device, bench._pool.tensor), bench._ids["scattered"], strict=True))
            (source, of), (target, to) = sides if direction == "store" else sides[::-1]
            source.random_(-128, 128)
            bench.ways(direction, "scattered")[name]()
            assert (target[to] == source[of]).all(), name
            bench.close()


@pytest.mark.parametrize("codec", [None, {"type": "fp8", "dtype": "bfloat16"}])
def test_tier_without_client_is_measured_alone(run_json, codec):
    entry = json.dumps({"type": "memory", "capacity": "64MiB", "codec": codec})
    rates = run_json("bench", "tier", entry, "--block-bytes", "64KiB", "--size", "1MiB", "--rounds", "2")
    assert (rates["num_blocks"], rates["num_rounds"], rates["block_bytes"]) == (16, 2, 1 << 16)
    assert min(rates["store_bytes_per_s"], rates["load_bytes_per_s"]) > 0
    assert (rates["plain_store_bytes_per_s"], rates["plain_load_bytes_per_s"]) == (0, 0)


def test_valkey_measured_in_turns_is_unchanged(run):
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
