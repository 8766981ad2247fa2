"""`kvcache bench copy` measures every way in one run, and rejects unsupported options."""

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
    assert len(rates) == 2 * 2 * 2 * 6
    assert {rate["way"] for rate in rates} == {
        "one large copy",
        "kvcache, 1 thread",
        "kvcache, 2 threads",
        "torch copy_ per block",
        "torch index_select",
        "torch indexing",
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
            target, source = (
                (bench._pool.tensor, bench._device)
                if direction == "store"
                else (
                    bench._device,
                    bench._pool.tensor,
                )
            )
            source.random_(-128, 128)
            device_ids, host_ids = bench._ids["scattered"]
            to, of = (host_ids, device_ids) if direction == "store" else (device_ids, host_ids)
            bench.ways(direction, "scattered")[name]()
            assert (target[to] == source[of]).all(), name
            bench.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--sizes", "4KiB,fast"),
            "--sizes must be bytes >= 1 or a size such as '64GiB', '64GB' or '1.5TiB', got 'fast'",
        ),
        (("--blocks", "0"), "--blocks must be >= 1, got 0"),
        (("--threads", "0"), "--threads must be a whole number >= 1, such as 10000 or '10k', got '0'"),
        (("--bytes", "1MiB", "--sizes", "4MiB"), "--bytes must hold a block of 4194304 bytes, got '1MiB'"),
        (("--device", "tpu"), "--device must be cpu or cuda, got 'tpu'"),
        (("--plot", "/nowhere/x.png"), "--plot cannot be written: '/nowhere/x.png'"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, options, message):
    status, _, err = run("bench", "copy", *options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
