"""`kvcache bench copy` measures every way in one run."""

import json

import pytest

pytest.importorskip("typer")

from kvcache.lab.bench.copy import CopyBench


@pytest.mark.slow
def test_every_way_is_measured_in_both_directions_and_layouts(run, tmp_path):
    plot = tmp_path / "ratios.png"
    options = ("--sizes", "4KiB,16KiB", "--blocks", "20", "--repeats", "1", "--json", "-", "--plot", str(plot))
    status, out, err = run("bench", "copy", *options)
    assert status == 0
    rates = json.loads(out)["rates"]
    assert len(rates) == 2 * 2 * 2 * 5
    assert {rate["way"] for rate in rates} == {
        "one large copy",
        "kvcache, 1 thread",
        "kvcache, 2 threads",
        "torch copy_ per block",
        "torch index_select",
    }
    assert {(rate["direction"], rate["layout"]) for rate in rates} == {
        (direction, layout) for direction in ("store", "load") for layout in ("scattered", "contiguous")
    }
    for rate in rates:
        assert rate["gb_per_s"] == pytest.approx(rate["num_blocks"] * rate["block_bytes"] / rate["seconds"] / 1e9)
        assert rate["way"] != "one large copy" or rate["ratio"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")
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
