"""Recordings of a real engine: they replay to the same answers, also one that began later."""

import pytest
from engine_options import BLOCK_BYTES

from kvcache.exporters.status import ask
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording
from kvcache.recorder.ops import Op


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [[], [{"type": "memory", "capacity": 60 * BLOCK_BYTES}]], ids=["host", "tiered"])
def test_engine_is_recorded_on_request(boot, models, prompts, crowd, expected, run, tmp_path, sockets, tiers):
    socket = str(sockets / "status")
    first, second = str(tmp_path / "first.kvlog"), str(tmp_path / "second.kvlog")
    extra_config = {
        "cpu_bytes_to_use": 50 * BLOCK_BYTES,
        "cache_policy": "arc",
        "record": first,
        "exporters": [{"type": "status", "path": socket}],
        **({"tiers": tiers} if tiers else {}),
    }
    asked = [*prompts, *crowd]
    with boot(models["llama"], extra_config) as engine:
        for _ in range(2):
            assert engine.answers(asked) == expected(asked)
            engine.drop_device_cache()
        with pytest.raises(ValueError, match="recorded already"):
            ask(socket, "record", action="start", file=second)
        assert ask(socket, "record", action="stop")["num_lost"] == 0
        assert ask(socket, "record") == {"file": None}
        engine.generate(prompts[:1])

        assert ask(socket, "record", action="start", file=second)["file"] == second
        engine.generate(crowd)
        # What the manager holds is known from here on.
        engine.drop_device_cache(host_too=True)
        assert engine.answers(asked) == expected(asked)
        assert ask(socket, "record")["num_lost"] == 0
        loaded = engine.stats.loaded_blocks
    assert loaded > 0

    # The engine has stopped, and ended the second recording.
    assert "every answer is the same" in run("rerun", first)[1]
    ops = [record.op for record in Recording(first)]
    # The last ones end with the engine's next step.
    assert len(asked) <= ops.count(Op.ON_REQUEST_FINISHED) <= 2 * len(asked)
    assert ops[-1] is Op.STATS
    assert [record.op for record in Recording(second)][-1] is Op.STATS
    if not tiers:
        assert "every answer is the same" in run("rerun", second)[1]
        assert replay_recording(Recording(first), "lru").difference is not None
    assert run("plan", second, "--policy", "lru,arc,min", "--blocks", "20,50", "--quiet")[0] == 0
