"""Read a recording as a trace: a plan of it reproduces the hits of the engine."""

import pytest

from kvcache.lab.simulate.run import Replay
from kvcache.lab.simulate.tiered import DiskChoice, patient_manager
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.keys import KeyMaker
from kvcache.recorder.recorder import Recorder
from kvcache.tiers.base.tier import host_rows


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_plan_of_recording_reproduces_disk_hits(run, run_json, tmp_path, policy):
    disk = DiskChoice(tmp_path / "kv", 64 << 20)
    with patient_manager(16, policy, disk, host_rows(400, 4096)) as manager:
        replay, make_keys = Replay(manager), KeyMaker()
        with Recorder(manager, tmp_path / "run.kvlog"):
            for request in ChatWorkload(num_requests=60, seed=1):
                replay.step(request, make_keys(request.hash_ids))
    alone, over = run_json("plan", tmp_path / "run.kvlog", "--jobs", 1)["cells"]
    assert [cell["policy"] for cell in (alone, over)] == [policy, policy]
    assert alone["num_blocks"] == over["num_blocks"] == 400
    assert alone["hit_blocks"] < over["hit_blocks"] == replay.tally.hit_blocks
    assert "disk without limit" in " ".join(run("plan", tmp_path / "run.kvlog", "--jobs", 1)[1].split())
