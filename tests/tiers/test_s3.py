"""The S3 tier on a server in this process and, as slow tests, on moto's."""

import time

import pytest
from local_stores import LocalS3
from stores import (
    KEYS,
    MotoServer,
    StoreContract,
    blocks,
    found,
    load,
    load_as_is,
    payload,
    set_credentials,
    store,
    store_as_is,
    until,
    wait_for_reset,
)

from kvcache.assembly.assemble import parse_tier
from kvcache.tiers import s3
from kvcache.tiers.base import lifecycle
from kvcache.tiers.base.checksum import SEAL_BYTES
from kvcache.tiers.s3 import S3Options, S3Tier
from kvcache.tiers.valkey_wire import Channel

BLOCK_BYTES = 4096
HUGE_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    set_credentials(monkeypatch)


@pytest.fixture
def local():
    server = LocalS3("blocks")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def moto():
    server = MotoServer("blocks")
    yield server
    server.kill()


@pytest.fixture(params=["local", pytest.param("moto", marks=pytest.mark.slow)])
def server(request):
    return request.getfixturevalue(request.param)


class TestContract(StoreContract):
    tier_type = S3Tier

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.place = server.place


@pytest.fixture
def start(local, opened):
    """Start an engine on the local server."""

    def start_one(**options):
        opened.append(S3Tier(host_blocks=blocks(), **local.place | options))
        return opened[-1]

    return start_one


@pytest.fixture
def tier(start):
    return start()


@pytest.fixture(autouse=True)
def patient_deletion(monkeypatch):
    """Deletion starts a process that imports the package: on a loaded machine this takes longer than the limit."""
    monkeypatch.setattr(s3, "_DELETE_S", 50.0)


def path_of(tier, key):
    return tier.store_name(key).decode().replace(":", "/")


def huge(request, status=200):
    """Announce far more than is sent."""
    request.reply(status, bytes(1 << 16), HUGE_BYTES)
    request.hang_up()


def refusing(status, code):
    """Return what refuses a request with a code of S3."""
    return lambda request: request.refuse(status, code)


busy = refusing(503, "SlowDown")


def test_objects_lie_below_prefix(local, start):
    tier = start(prefix="team/a", fingerprint={"model": "org/m: ?#%20ä"})
    store(tier, KEYS[:2])
    assert all(path.startswith("team/a/kvcache/") for path in local.objects)
    name = f"team/a/{path_of(tier, KEYS[0])}"
    assert name.endswith(f"/{KEYS[0].hex()}")
    value = local.objects[name]
    assert (value[:BLOCK_BYTES], len(value)) == (payload(KEYS[0], BLOCK_BYTES).tobytes(), BLOCK_BYTES + SEAL_BYTES)
    assert found(start(prefix="team/a2"), KEYS[:2]) == found(start(), KEYS[:2]) == 0


def test_answers_of_head_are_remembered(local, start, tier):
    store(start(), KEYS[:40])
    local.calls.clear()
    for _ in range(3):
        assert found(tier, KEYS) == 40
    assert local.calls["HEAD"] == len(KEYS)


def test_block_is_sent_in_one_request(local, start):
    first, second = start(), start()
    local.calls.clear()
    assert sorted(store(first, KEYS[:8]).done) == KEYS[:8]
    assert local.calls == {"PUT": 8}
    # Created by another engine since then.
    result = store(second, KEYS[4:12])
    assert (sorted(result.done), result.failed, second.stats().stored_blocks) == (KEYS[8:12], [], 4)
    assert local.calls == {"PUT": 16}


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + SEAL_BYTES - 1, BLOCK_BYTES + SEAL_BYTES + 1])
def test_object_of_other_length_is_deleted(local, tier, num_bytes):
    store(tier, KEYS[:3])
    local.objects[path_of(tier, KEYS[1])] = bytes(num_bytes)
    result = load(tier, KEYS[:3])
    assert (result.done, result.failed, result.error) == ([KEYS[0], KEYS[2]], [KEYS[1]], "")
    assert tier.stats().corrupt_blocks == 1
    assert path_of(tier, KEYS[1]) not in local.objects
    assert store(tier, KEYS[1:2]).done == KEYS[1:2]


def test_huge_object_is_not_read(local, tier):
    store(tier, KEYS[:2])
    local.calls.clear()
    local.spoil(huge, "GET")
    result = load(tier, KEYS[:1])
    assert (result.done, result.failed, result.error, local.calls["GET"]) == ([], KEYS[:1], "", 1)
    local.heal()
    assert load(tier, KEYS[1:2], 9).done == KEYS[1:2]


@pytest.mark.parametrize(
    ("status", "command"), [(404, "GET"), (412, "PUT"), (500, "GET"), (200, "PUT"), (200, "DELETE")]
)
def test_huge_answer_takes_no_memory(local, tier, status, command):
    """The library's own requests would reserve all that an answer announces."""
    store(tier, KEYS[:3])
    local.objects[path_of(tier, KEYS[1])] = b"deleted when it is read"
    local.spoil(lambda request: huge(request, status), command)
    store_as_is(tier, KEYS[4:5], 7)
    assert load_as_is(tier, KEYS[:2], 8).done == ([] if command == "GET" else KEYS[:1])
    local.heal()
    assert load(tier, KEYS[2:3], 9).done == KEYS[2:3]


def test_huge_listing_ends_no_engine(local, tier):
    private_blocks(tier, local)
    local.calls.clear()
    local.spoil(huge, "LIST")
    tier.reset()
    wait_for_reset(tier)
    assert local.calls["GET"] > 0
    assert store(tier, KEYS[:2], 60).done == KEYS[:2]


def test_failed_deletion_is_tried_again(local, start, monkeypatch):
    monkeypatch.setattr(lifecycle, "RETRY_S", 0.01)
    tier = start()
    paths = private_blocks(tier, local)
    local.spoil(refusing(500, "InternalError"), "LIST", times=4)
    tier.reset()
    wait_for_reset(tier)
    assert not set(paths) & local.objects.keys()


def test_long_deletion_goes_on_later(local, start, monkeypatch):
    """The private blocks are too many to be deleted in time. They have names that no engine will ask for."""
    time_s = s3._DELETE_S
    monkeypatch.setattr(s3, "_DELETE_S", 0.01)
    tier = start()
    paths = private_blocks(tier, local)
    tier.reset()
    wait_for_reset(tier)
    assert set(paths) <= local.objects.keys()
    assert store(tier, KEYS[:2], 60).done == KEYS[:2]
    monkeypatch.setattr(s3, "_DELETE_S", time_s)
    assert tier._life.maintain(60)
    assert not set(paths) & local.objects.keys()
    assert load(tier, KEYS[:2], 61).done == KEYS[:2]


@pytest.mark.parametrize("status", [201, 202, 206])
def test_download_is_answered_with_200(local, tier, status):
    """Any other answer, even as long as the block, does not fill the buffer."""
    store(tier, KEYS[:2])
    local.spoil(lambda request: request.reply(status, local.objects[request.key]), "GET")
    result = load_as_is(tier, KEYS[:2])
    assert (result.done, f"status {status}" in result.error, tier.stats().corrupt_blocks) == ([], True, 0)
    local.heal()
    assert load(tier, KEYS[:2], 9).done == KEYS[:2]


def test_changed_or_moved_object_misses(local, tier):
    store(tier, KEYS[:4])
    names = [path_of(tier, key) for key in KEYS[:4]]
    changed = bytearray(local.objects[names[0]])
    changed[100] ^= 1
    local.objects.update({names[0]: bytes(changed), names[1]: local.objects[names[2]]})
    assert load(tier, KEYS[:4]).done == KEYS[2:4]
    assert tier.stats().corrupt_blocks == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((403, "InvalidAccessKeyId"), "s3://blocks at http://127.0.0.1:.*: InvalidAccessKeyId: as a test wants it"),
        ((403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch"),
        ((401, "AccessDenied"), "AccessDenied"),
        ((404, "NoSuchBucket"), "NoSuchBucket"),
    ],
)
def test_mistake_of_configuration_ends_start(local, start, answer, message):
    local.spoil(refusing(*answer))
    with pytest.raises(ValueError, match=message) as caught:
        start()
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("answer", [(403, "RequestTimeTooSkewed"), (503, "SlowDown"), (500, "InternalError")])
def test_passing_fault_is_named_not_fatal(local, start, answer):
    local.spoil(refusing(*answer))
    tier = start()
    assert answer[1] in store(tier, KEYS[:1]).error
    assert "refuses" not in store_as_is(tier, KEYS[:1], 7).error
    local.heal()
    assert store(tier, KEYS[:2], 8).done
    assert load(tier, KEYS[:2]).done == KEYS[:2]


def test_engine_starts_without_server(local, start):
    local.kill()
    tier = start()
    assert store(tier, KEYS[:1]).error.startswith("OSError: s3://blocks at http://127.0.0.1:")
    local.start()
    assert store(tier, KEYS[:2], 5).done


def test_busy_server_is_asked_again(local, tier):
    local.calls.clear()
    local.spoil(busy, times=2)
    assert store(tier, KEYS[:1]).done == KEYS[:1]
    assert local.calls == {"PUT": 3}


def test_attempts_share_time_limit(local, start, monkeypatch):
    """A store that is busy at first has the rest of the time for later attempts, also with a new connection."""
    tier, limits, limit = start(timeout_s=50.0), [], Channel.limit
    monkeypatch.setattr(Channel, "limit", lambda channel, seconds: limits.append(seconds) or limit(channel, seconds))
    acts = iter((lambda request: (time.sleep(0.2), busy(request)), lambda request: request.hang_up()))
    local.spoil(lambda request: next(acts)(request), times=2)
    assert store(tier, KEYS[:1]).done == KEYS[:1]
    first, second, third = limits
    assert 50 >= first > second + 0.2 > third + 0.2


@pytest.mark.parametrize("command", ["GET", "PUT", "HEAD"])
def test_slow_server_fails_in_time(local, start, command):
    tier = start(timeout_s=0.2)
    store(tier, KEYS[:1])
    local.spoil(lambda request: (time.sleep(1.0), request.hang_up()), command)
    start_s = time.monotonic()
    if command == "HEAD":
        tier.lookup(KEYS[1:3])
        until(lambda: tier.get_finished() or tier.stats().io_errors)
        assert tier.lookup(KEYS[1:3]) == 0
    else:
        result = (store_as_is if command == "PUT" else load_as_is)(tier, KEYS[:1] if command == "GET" else KEYS[1:2])
        assert result.error.startswith("OSError: s3://blocks")
    assert time.monotonic() - start_s < 60
    assert tier.stats().io_errors == 1


def test_cut_answers_fill_no_block(local, tier):
    store(tier, KEYS[:4])

    def cut(request):
        request.reply(200, local.objects[request.key][:2000], BLOCK_BYTES + SEAL_BYTES)
        request.hang_up()

    local.spoil(cut, "GET")
    result = load(tier, KEYS[:4])
    assert (result.done, sorted(result.failed)) == ([], KEYS[:4])
    assert result.error.startswith("OSError: s3://blocks")
    local.heal()
    assert load(tier, KEYS[:4], 3).done == KEYS[:4]


def test_bucket_that_vanishes_fails_jobs(local, tier):
    store(tier, KEYS[:2])
    objects = local.buckets.pop("blocks")
    assert "NoSuchBucket" in store(tier, KEYS[2:3], 3).error
    assert "NoSuchBucket" in load(tier, KEYS[:1], 4).error
    assert tier.stats().corrupt_blocks == 0
    local.buckets["blocks"] = objects
    assert load(tier, KEYS[:2], 5).done == KEYS[:2]


def test_stale_answers_are_misses(local, start, tier):
    store(tier, KEYS[:4])
    # HEAD and the listing still show a deleted object, and do not show a present one.
    del local.objects[path_of(tier, KEYS[1])]
    local.spoil(lambda request: request.reply(200, num_bytes=4112), "HEAD")
    other = start()
    assert found(other, KEYS[:4]) == 4
    assert load(other, KEYS[:4]).done == [KEYS[0], KEYS[2], KEYS[3]]
    assert (other.stats().missed_blocks, other.stats().corrupt_blocks) == (1, 0)


def private_blocks(tier, local):
    """Make the tier's epoch private, store blocks, and return their paths."""
    tier.reset()
    wait_for_reset(tier)
    store(tier, KEYS[:5], 50)
    return [path_of(tier, key) for key in KEYS[:5]]


def test_reset_deletes_private_blocks(local, tier):
    store(tier, KEYS[:3])
    paths = private_blocks(tier, local)
    foreign = {"kvcache": b"", f"{paths[0].rpartition('/')[0]}2/{KEYS[0].hex()}": b"another epoch's"}
    local.objects.update(foreign)
    before = local.objects.keys() - set(paths)
    tier.reset()
    wait_for_reset(tier)
    assert local.objects.keys() == before


@pytest.mark.parametrize("answer", [(403, "AccessDenied"), None])
def test_reset_without_deletion_still_ends(local, tier, answer):
    paths = private_blocks(tier, local)
    # Either nothing may be deleted, or the listing shows names that have gone and hides those that are there.
    if answer is None:
        hidden = {path: local.objects.pop(path) for path in paths[:2]}
    else:
        local.spoil(refusing(*answer), "POST")
    tier.reset()
    wait_for_reset(tier)
    if answer is None:
        local.objects.update(hidden)
    assert found(tier, KEYS[:5]) == 0
    assert set(paths) & local.objects.keys() == set(paths if answer else paths[:2])


def test_corrupt_block_without_permission_stays(local, tier):
    store(tier, KEYS[:2])
    local.objects[path_of(tier, KEYS[0])] = bytes(BLOCK_BYTES + SEAL_BYTES)
    local.spoil(refusing(403, "AccessDenied"), "DELETE")
    result = load(tier, KEYS[:2])
    assert (result.done, result.error, tier.stats().corrupt_blocks) == (KEYS[1:2], "", 1)


@pytest.mark.parametrize("content", [b"", b"../../../etc", b"0123456789ABCDEF", b"0" * 16 + b"/", bytes(1 << 20)])
def test_foreign_epoch_is_never_joined(local, start, tier, content):
    local.objects[tier.epoch_name.decode().replace(":", "/")] = content
    late = start()
    assert "has a foreign object as kvcache/" in store(late, KEYS[:1]).error
    assert late.epoch == ""


def test_panic_of_library_is_an_error(start, monkeypatch):
    class PanicException(BaseException):
        """As the library raises it if one of its threads panicked."""

    def panic(*_, **__):
        raise PanicException("request valid")

    tier = start()
    monkeypatch.setattr(s3.obstore, "sign", panic)
    assert "OSError: s3://blocks" in store(tier, KEYS[:1]).error
    assert "request valid" in S3Tier.unavailable_reason(S3Options(bucket="blocks"))


def test_arbiter_is_on_unless_refused(local):
    entry = {"type": "s3", "bucket": "blocks"}
    assert [parse_tier(entry | part).config.arbiter for part in ({}, {"arbiter": None}, {"arbiter": False})] == [
        True, True, False,
    ]  # fmt: skip
    assert not parse_tier({"type": "memory", "capacity": 1 << 20}).config.arbiter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket": "a/b"}, "bucket in an s3 tier must be the name of a bucket"),
        ({"bucket": "bucket?x=1"}, "must be the name of a bucket"),
        ({"prefix": "/a"}, "prefix in an s3 tier must be names of letters"),
        ({"prefix": "a//b"}, "prefix in an s3 tier must be names of letters"),
        ({"prefix": "a/../b"}, "prefix in an s3 tier must be names of letters"),
        ({"prefix": "a b"}, "prefix in an s3 tier must be names of letters"),
        ({"prefix": "kvcache:"}, "prefix in an s3 tier must be names of letters"),
        ({"endpoint": "127.0.0.1:9000"}, "endpoint in an s3 tier must be 'https://host:port'"),
        ({"endpoint": "http://id:hunter2@host"}, "endpoint in an s3 tier must be 'https://host:port'"),
        ({"endpoint": "http://host:port"}, "must be 'https://host:port'"),
        ({"endpoint": "http://ho st"}, "must be 'https://host:port'"),
        ({"endpoint": "http://host/bucket"}, "endpoint in an s3 tier must have no path"),
        ({"ca_file": "/no/such/file"}, "cannot be used: .*No such file"),
        ({"access_key_id": "hunter2"}, "unknown options of an s3 tier: access_key_id"),
    ],
)
def test_bad_options_show_no_secret(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_tier({"type": "s3", "bucket": "blocks", **options}).make(blocks(), {})
    assert "hunter2" not in str(caught.value)


def test_check_leaves_nothing_behind(server):
    options = S3Options(**server.place)
    before = dict(server.objects) if isinstance(server, LocalS3) else None
    assert S3Tier.unavailable_reason(options) == ""
    if before is not None:
        assert server.objects == before
        assert server.calls["PUT"] == 2, "the epoch, and a block"


@pytest.mark.parametrize(
    ("act", "commands", "message"),
    [
        (refusing(403, "AccessDenied"), (), "AccessDenied"),
        (refusing(403, "AccessDenied"), ["PUT"], "AccessDenied"),
        (refusing(403, "AccessDenied"), ["DELETE"], "does not delete names"),
        (refusing(403, "RequestTimeTooSkewed"), (), "RequestTimeTooSkewed"),
        (refusing(404, "NoSuchBucket"), (), "NoSuchBucket"),
        (busy, (), "SlowDown"),
        (lambda request: request.reply(200), ["PUT"], "does not keep the epoch"),
    ],
)
def test_check_names_the_fault(local, act, commands, message):
    local.spoil(act, *commands)
    assert message in S3Tier.unavailable_reason(S3Options(**local.place))


@pytest.fixture
def clear(run, local):
    def clear_target(target, *options):
        code, *output = run("tier", "clear", target, "--endpoint", local.endpoint, "--yes", *options)
        return code, " ".join(" ".join(output).split())

    return clear_target


def test_clear_leaves_neighbours_alone(clear, local, start):
    prefixes = ("team", "team2", "team/b", "")
    tiers = [start(prefix=prefix) if prefix else start() for prefix in prefixes]
    for tier in tiers:
        store(tier, KEYS[:3])
    local.objects.update({"team/kvcache2/x": b"", "team/other": b"", "kvcache": b""})
    before = dict(local.objects)
    code, output = clear("s3://blocks/team")
    assert (code, "deleted 4 names" in output, f"{tiers[0].prefix.decode()}: 4" in output) == (0, True, True)
    gone = before.keys() - local.objects.keys()
    assert all(path.startswith("team/kvcache/") for path in gone)
    assert len(gone) == 4
    code, _ = clear("s3://blocks")
    assert (code, len(local.objects)) == (0, len(before) - 8)
    assert [found(tier, KEYS[:3]) for tier in (start(prefix="team2"), start(prefix="team/b"))] == [3, 3]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("s3://blocks", ["--prefix", "other"], "--prefix must begin with 'kvcache:'"),
        ("s3://blocks", ["--prefix", "kvcache:/"], "no pattern or slash"),
        ("s3://blocks", ["--connected"], "need the URL of a Valkey server"),
        ("s3://", [], "must be the name of a bucket"),
        ("s3://id:hunter2@blocks", [], "must be the name of a bucket"),
        ("s3://nobody", [], "NoSuchBucket"),
        ("kv", [], "--endpoint needs a bucket"),
    ],
)
def test_clear_refuses_what_is_unclear(clear, local, target, options, message):
    local.objects["kvcache/a/b/c"] = b""
    code, output = clear(target, *options)
    assert (code != 0, message in output) == (True, True), output
    assert len(local.objects) == 1
