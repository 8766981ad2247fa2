"""Every fault of one answer, and what each store's tier makes of it: no wrong byte, and the next job works.

A row names a store and a fault; what only one store does is tested in that store's file.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from local_stores import (
    EXISTS,
    NO_SPACE,
    NOT_READY,
    LocalS3,
    LocalValkey,
    announcing,
    local_cluster,
    refusing,
    replying,
)
from stores import (
    KEYS,
    MooncakeStore,
    MotoServer,
    StoreContract,
    blocks,
    found,
    load,
    put,
    set_credentials,
    store,
    store_until_done,
    until,
    wait_for_reset,
)

from kvcache.tiers.mooncake import MooncakeTier
from kvcache.tiers.s3 import S3Tier
from kvcache.tiers.valkey import ValkeyTier

TIERS = {"valkey": ValkeyTier, "cluster": ValkeyTier, "s3": S3Tier, "mooncake": MooncakeTier}
REAL = {"real_valkey": "make_valkey", "real_s3": "moto", "real_mooncake": "mooncake_store"}
REAL_PARAMS = [pytest.param(name, marks=pytest.mark.slow) for name in REAL]


@pytest.fixture(scope="module")
def moto():
    server = MotoServer("blocks")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def mooncake_store(tmp_path_factory, native):
    store = MooncakeStore(tmp_path_factory.mktemp("store"))
    store.start_node()
    store.wait_for_memory()
    yield store
    store.close()


@pytest.fixture(params=[*TIERS, *REAL_PARAMS])
def place(request, monkeypatch):
    """A store, its options, and the type of its tier."""
    set_credentials(monkeypatch)
    name = request.param.removeprefix("real_")
    if request.param in REAL:
        server = request.getfixturevalue(REAL[request.param])
        server = server() if name == "valkey" else server
    else:
        open_local = {"valkey": LocalValkey, "cluster": lambda: local_cluster()[0], "s3": partial(LocalS3, "blocks")}
        server = open_local[name]() if name in open_local else request.getfixturevalue("local_mooncake")
    yield SimpleNamespace(name=name, tier_type=TIERS[name], server=server, options=server.place)
    if request.param not in REAL:
        server.heal()
        for peer in getattr(server, "peers", [server]):
            peer.kill()


@pytest.fixture
def start(place, opened, tmp_path):
    """Start an engine on the store, with names of the test's own."""
    options = {"salt": str(tmp_path)} | place.options

    def start_one(**others):
        opened.append(place.tier_type.from_config(options | others, blocks(), {"model": "m"}))
        return opened[-1]

    return start_one


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, place):
        self.tier_type, self.place = place.tier_type, place.options
        # Mooncake's client overwrites nothing.
        self.overwrites = place.name != "mooncake"


# What answers a command for one of four blocks; then what becomes of the block, or the error of its job.
ANSWERS = {
    "valkey": [
        ("GET", b"-LOADING not yet\r\n", "LOADING not yet"),
        ("GET", b"HTTP/1.1 400 Bad Request\r\n", "does not speak the protocol"),
        ("GET", b"$5\r\nshort", "does not end where"),
        ("GET", b"$2\r\nabcd\r\n", "does not end where"),
        ("GET", b"$1073741824\r\n", "does not speak the protocol"),
        ("GET", b":x\r\n", "does not speak the protocol"),
        ("GET", b"+OK\n", "does not speak the protocol"),
        ("GET", b"x" * 5000, "lines without an end"),
        ("GET", b"$4112\r\n" + bytes(4112) + b"xx", "does not end where"),
        ("GET", "hang", "took more than 2 s"),
        ("GET", b"$-1\r\n", "missed"),
        ("GET", b"-WRONGTYPE not a string\r\n", "corrupt"),
        ("SET", b"-OOM no memory\r\n", "refused"),
        ("SET", b"-READONLY a replica\r\n", "READONLY a replica"),
        ("SET", "hang", "took more than 2 s"),
        ("SET", b"$-1\r\n", "does not speak the protocol"),
        ("TOUCH", b"-NOPERM no\r\n", "NOPERM no"),
        ("UNLINK", b"-NOPERM no\r\n", "kept"),
    ],
    "s3": [
        ("GET", announcing(200), "corrupt"),
        ("GET", announcing(404), "missed"),
        ("GET", announcing(500), "OSError: s3://blocks"),
        ("GET", announcing(200, 2000, 4112), "OSError: s3://blocks"),
        *(("GET", replying(status), f"status {status}") for status in (201, 202, 206)),
        ("GET", "hang", "OSError: s3://blocks"),
        ("GET", refusing(404, "NoSuchBucket"), "NoSuchBucket"),
        ("GET", refusing(404, "NoSuchKey"), "missed"),
        ("PUT", refusing(404, "NoSuchBucket"), "NoSuchBucket"),
        ("PUT", announcing(412), "held"),
        ("PUT", announcing(200), "done"),
        ("PUT", "hang", "OSError: s3://blocks"),
        ("DELETE", announcing(200), "corrupt"),
        ("DELETE", refusing(403, "AccessDenied"), "kept"),
    ],
    "mooncake": [
        ("get", NOT_READY, "missed"),
        ("get", -900, "master cannot be reached"),
        ("put", EXISTS, "held"),
        ("put", NO_SPACE, "refused"),
        ("put", -800, "transfer failed (-800)"),
        ("exist", -900, "master cannot be reached"),
        ("remove", -706, "kept"),
        ("remove", NOT_READY, "corrupt"),
    ],
}  # fmt: skip
OUTCOMES = ("done", "held", "refused", "missed", "corrupt", "kept")


@pytest.mark.parametrize(
    ("place", "kind", "act", "outcome"),
    [
        pytest.param(name, *row, id=f"{name}-{row[0]}-{i}")
        for name, rows in ANSWERS.items()
        for i, row in enumerate(rows)
    ],
    indirect=["place"],
)
def test_spoilt_answer_costs_its_block(place, start, caplog, kind, act, outcome):
    keys, tier = KEYS[:4], start(num_threads=1, timeout_s=2.0 if act == "hang" else 20.0)
    name, is_store = tier.store_name(keys[2]), kind in ("SET", "PUT", "put", "TOUCH", "exist")
    store_until_done(tier, keys[:1] if is_store else keys)
    if kind in ("UNLINK", "DELETE", "remove"):
        put(tier, name, bytes(16))
    place.server.spoil(act, kind, name=name)
    result = store(tier, keys[1:], 2) if is_store else load(tier, keys)
    if outcome in OUTCOMES:
        assert sorted(result.done) == [key for key in keys[is_store:] if key != keys[2] or outcome == "done"]
        assert (result.error, result.failed) == ("", [] if outcome in ("done", "held") else [keys[2]])
    else:
        # A request of S3 is for one block.
        assert (outcome in result.error, keys[2] in result.failed) == (True, True)
        assert (keys[3] in result.done) == (place.name == "s3")
    assert place.server.num_faults
    counts = tier.stats()
    assert (counts.missed_blocks, counts.corrupt_blocks) == (outcome == "missed", outcome in ("corrupt", "kept"))
    assert ("does not delete" in caplog.text) == (outcome == "kept")
    place.server.heal()
    # Nothing that the store still sends is taken for the answers of the next jobs.
    if outcome in OUTCOMES:
        store(tier, keys, 3)
        load(tier, keys, 4)
        store(tier, keys, 5)
    elif is_store:
        store_until_done(tier, keys)
    assert load(tier, keys, 6).done == keys


# Answers of a store at a start, with the text that the check reports, and whether an engine starts.
STARTS = {
    "valkey": [
        (None, b"-NOAUTH Authentication required.\r\n", "Authentication required", False),
        (None, b"-WRONGPASS invalid username-password pair\r\n", "refuses the credentials", False),
        (None, b"-LOADING not yet\r\n", "not yet", True),
        (None, b"HTTP/1.1 400 Bad Request\r\n", "127.0.0.1:", True),
        (None, "hang", "Timeout", True),
        *((kind, b"-NOPERM no permissions\r\n", "no permissions", True) for kind in ("GET", "SET", "TOUCH", "UNLINK")),
        ("SET", b"-OOM command not allowed\r\n", "command not allowed", True),
    ],
    "cluster": [
        ("CLUSTER", b"-ERR This instance has cluster support disabled\r\n", "127.0.0.1:", True),
        ("CLUSTER", b"*0\r\n", "127.0.0.1:", True),
        (None, b"-WRONGPASS invalid username-password pair\r\n", "refuses the credentials", False),
    ],
    "s3": [
        (None, refusing(403, "InvalidAccessKeyId"), "InvalidAccessKeyId", False),
        (None, refusing(401, "AccessDenied"), "AccessDenied", False),
        *((None, refusing(403, code), code, True) for code in ("RequestTimeTooSkewed", "ExpiredToken")),
        (None, refusing(404, "NoSuchBucket"), "NoSuchBucket", False),
        (None, refusing(404, "Odd"), "Odd", True),
        (None, refusing(503, "SlowDown"), "SlowDown", True),
        ("PUT", refusing(403, "AccessDenied"), "AccessDenied", False),
        ("PUT", lambda request: request.reply(200), "does not keep the epoch", True),
        ("DELETE", refusing(403, "AccessDenied"), "AccessDenied", True),
    ],
    "mooncake": [
        ("get", -900, "get failed: the master cannot be reached", True),
        ("put", -1, "write of the epoch failed", True),
        ("put", NO_SPACE, "write of the epoch failed: no space", True),
        ("exist", -1, "exists failed", True),
        ("remove", -1, "remove failed", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "kind", "act", "reason", "starts"),
    [pytest.param(name, *row, id=f"{name}-{i}") for name, rows in STARTS.items() for i, row in enumerate(rows)],
    indirect=["place"],
)
def test_fault_at_start_is_named(place, start, kind, act, reason, starts):
    timeout_s, options = 0.5 if act == "hang" else 20.0, place.tier_type.options_type(**place.options)
    check = place.tier_type.unavailable_reason
    place.server.spoil(act, *filter(None, [kind]))
    shown = check(replace(options, timeout_s=timeout_s))
    assert (reason in shown, "secret" in shown, len(shown.splitlines())) == (True, False, 1), shown
    if starts:
        tier = start(timeout_s=timeout_s)
        wait_for_reset(tier)
        assert kind in ("UNLINK", "DELETE", "remove") or reason in store(tier, KEYS[:1]).error
    else:
        with pytest.raises(ValueError, match=reason):
            start()
    place.server.heal()
    before = dict(place.server.values)
    assert (check(replace(options, timeout_s=20.0)), place.server.values) == ("", before)
    tier = tier if starts and act != "hang" else start()
    store_until_done(tier, KEYS[:2])
    assert load(tier, KEYS[:2]).done == KEYS[:2]


@pytest.mark.parametrize("place", ["valkey", "s3", REAL_PARAMS[0]], indirect=True)
def test_late_server_is_used(place, start):
    check = partial(place.tier_type.unavailable_reason, place.tier_type.options_type(**place.options))
    tier = None
    for keys in (KEYS[:2], KEYS[2:4]):
        place.server.kill()
        assert "cannot be used" in check()
        tier = tier or start(timeout_s=20.0)
        assert store(tier, [b"of an absent server"]).error.startswith("OSError: ")
        place.server.start()
        assert check() == ""
        store_until_done(tier, keys)
        assert load(tier, keys).done == keys


@pytest.mark.parametrize(
    ("place", "kind", "act"),
    [
        ("valkey", "EXISTS", b"-NOPERM no\r\n"),
        ("valkey", "EXISTS", "hang"),
        ("s3", "HEAD", refusing(500, "Odd")),
        ("s3", "HEAD", "hang"),
        ("mooncake", "exist", -900),
    ],
    indirect=["place"],
)
def test_failed_look_up_finds_nothing(place, start, kind, act):
    store_until_done(start(), KEYS[:4])
    tier = start(timeout_s=0.5 if act == "hang" else 20.0)
    wait_for_reset(tier)
    place.server.spoil(act, kind)
    tier.lookup(KEYS[:2])
    until(lambda: tier.get_finished() or tier.stats().io_errors)
    assert (tier.lookup(KEYS[:2]), tier.stats().io_errors) == (0, 1)
    place.server.heal()
    until(lambda: found(tier, KEYS[2:4]) == 2)
