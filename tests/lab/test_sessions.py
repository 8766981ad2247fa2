"""Recorded sessions of agents, merged into the traffic of several users."""

import json
from itertools import pairwise

import pytest

from kvcache.lab.traces.sessions import SessionTrace
from kvcache.lab.traces.trace import TraceError


def request(t, ids, **more):
    return {"t": t, "type": "n", "in": 64 * len(ids) + 5, "out": 7, "hash_ids": ids, "stop": "", **more}


def session(name, requests, **more):
    facts = {"id": name, "block_size": 64, "hash_id_scope": "local", "tool_tokens": 100, "system_tokens": 30}
    return facts | {"requests": requests} | more


def write(folder, *sessions):
    for each in sessions:
        (folder / f"{each['id']}.json").write_text(json.dumps(each))
    return folder


def steps(trace):
    return [(step.arrival_s, step.hash_ids.tolist()) for step in trace]


def test_one_user_takes_sessions_in_turn(tmp_path):
    write(
        tmp_path,
        session("a", [request(0.0, [1, 2, 3]), request(10.0, [1, 2, 3, 4])]),
        session("b", [request(0.0, [7, 8, 9]), request(5.0, [7, 8, 9, 3])]),
    )
    with SessionTrace(tmp_path, users=1) as trace:
        assert (trace.block_size, trace.format, trace.name) == (64, "sessions", tmp_path.name)
        found = steps(trace)
        assert trace.position_bytes == trace.size_bytes
    times, ids = zip(*found, strict=True)
    assert times in ((0.0, 10.0, 10.0, 15.0), (0.0, 5.0, 5.0, 15.0))
    # Both sessions share two blocks, the tools and the system prompt; their other blocks differ.
    assert ids[0][:2] == ids[1][:2] == ids[2][:2] == [0, 1]
    assert not set(ids[1][2:]) & set(ids[3][2:])
    assert len({block for named in ids for block in named}) == 2 + 2 + 2


def test_other_tools_share_nothing(tmp_path):
    write(tmp_path, session("a", [request(0.0, [1, 2])]), session("b", [request(0.0, [1, 2])], tool_tokens=99))
    assert sorted(block for _, ids in steps(SessionTrace(tmp_path, users=1)) for block in ids) == [0, 1, 2, 3]


def test_global_ids_are_alike_everywhere(tmp_path):
    each = [session(name, [request(0.0, [70, 80])], hash_id_scope="global") for name in "ab"]
    assert [ids for _, ids in steps(SessionTrace(write(tmp_path, *each), users=1))] == [[0, 1], [0, 1]]


def test_subagents_come_in_between(tmp_path):
    inner = {"t": 3.0, "type": "subagent", "requests": [request(3.5, [1, 9]), request(8.0, [1, 9, 10])]}
    relative = {"t": 20.0, "type": "subagent", "requests": [request(1.0, [1, 11])]}
    write(tmp_path, session("a", [request(0.0, [1, 2]), inner, request(5.0, [1, 2, 3]), relative]))
    assert [at_s for at_s, _ in steps(SessionTrace(tmp_path, users=1))] == [0.0, 3.5, 5.0, 8.0, 21.0]


def test_users_overlap_by_the_seed(tmp_path):
    write(tmp_path, *(session(f"s{i}", [request(t * 300.0, [1, 2, 3 + t]) for t in range(5)]) for i in range(6)))
    runs = [steps(SessionTrace(tmp_path, users=3, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 30
    assert all(before[0] <= after[0] for before, after in pairwise(runs[0]))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "a.json: not JSON"),
        ([], "a.json: must be a JSON object with a list 'requests'"),
        (session("a", [], block_size=0), "block_size must be an int >= 1, got 0"),
        (session("a", [], hash_id_scope="mine"), "hash_id_scope must be 'local' or 'global', got 'mine'"),
        (session("a", [request(-1.0, [1])]), "t must be seconds in 0..1e9, got -1.0"),
        (session("a", [request(0.0, [1], **{"in": -5})]), "in must be an int in 0..2\\*\\*40, got -5"),
        (
            session("a", [request(0.0, [1, 2], **{"in": 60})]),
            "hash_ids must be those of 60 tokens in blocks of 64, got",
        ),
        (session("a", [request(0.0, ["x"])]), "hash_ids must be a list of ints"),
        (session("a", [7]), "requests must be JSON objects"),
        (session("a", [], tool_tokens="9"), 'tool_tokens must be an int in 0..2\\*\\*40, got "9"'),
    ],
)
def test_bad_session_is_named_or_skipped(tmp_path, document, message):
    (tmp_path / "a.json").write_text(document if isinstance(document, str) else json.dumps(document))
    for skip_bad, fault in ((False, message), (True, "holds no session")):
        with pytest.raises(TraceError, match=fault):
            list(SessionTrace(tmp_path, skip_bad=skip_bad))
    write(tmp_path, session("b", [request(0.0, [1])]))
    with SessionTrace(tmp_path, skip_bad=True) as trace:
        assert len(list(trace)) == 1
        assert trace.num_skipped == 1


def test_missing_folder_and_users_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot open sessions .*: No such file or directory"):
        SessionTrace(tmp_path / "none")
    with pytest.raises(ValueError, match="users must be an int >= 1, got 0"):
        SessionTrace(tmp_path, users=0)


def test_command_replays_sessions(run_json, tmp_path):
    for i in range(3):
        write(tmp_path, session(f"s{i}", [request(9.0 * t, [1, 2, *range(3, 5 + t)]) for t in range(4)]))
    document = run_json("replay", tmp_path, "--no-data", "--users", 2, "--blocks", 40)
    assert document["source"] == {"kind": "trace", "file": str(tmp_path), "format": "sessions", "skipped_lines": 0}
    # Of 66 blocks named, 2 are shared, and each session has 5 of its own.
    assert (document["requests"], document["blocks"], document["hit_blocks"]) == (12, 66, 66 - 2 - 3 * 5)
