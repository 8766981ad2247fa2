"""`kvcache fleet-demo`: engines in processes over one real server load blocks that another engine computed."""

import pytest

from kvcache.lab.bench.servers import find_valkey

pytest.importorskip("typer")


@pytest.mark.skipif(find_valkey() is None, reason="needs valkey-server or redis-server")
@pytest.mark.slow
def test_second_engine_hits_blocks_of_first(run_json, tmp_path):
    plot = tmp_path / "fleet.png"
    document = run_json("fleet-demo", "--widths", "3", "--requests", "6", "--plot", plot, "--quiet")
    first, second = document["one_after_the_other"]["engines"]
    assert first["store_blocks"] == 0
    assert second["store_blocks"] > 0
    # No block in the store was computed or stored again.
    assert document["one_after_the_other"]["stored_blocks"] == document["one_after_the_other"]["unique_blocks"]
    (together,) = document["together"]
    assert together["num_engines"] == 3
    assert together["unique_blocks"] <= together["stored_blocks"] < 2 * together["unique_blocks"]
    for report in (document["one_after_the_other"], together):
        for engine in report["engines"]:
            assert engine["wrong_blocks"] == 0
            parts = engine["host_blocks"] + engine["store_blocks"] + engine["computed_blocks"]
            assert parts == engine["needed_blocks"]
            assert len(engine["first_block_s"]) == 6
    assert plot.read_bytes().startswith(b"\x89PNG")
