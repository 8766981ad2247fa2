"""The S3 tier on a server in this process and, as slow tests, on moto's."""

import ast
import re
import resource
import time
from pathlib import Path

import pytest
from local_stores import LocalS3, announcing, refusing
from stores import (
    KEYS,
    blocks,
    found,
    load,
    payload,
    set_credentials,
    store,
    until,
    wait_for_reset,
)

from kvcache.assembly.assemble import parse_tier
from kvcache.tiers import s3, s3_wire
from kvcache.tiers.channel import Channel
from kvcache.tiers.s3 import S3Options, S3Tier
from kvcache.tiers.shared_store import SEAL_BYTES

BLOCK_BYTES = 4096


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    set_credentials(monkeypatch)


@pytest.fixture
def local():
    server = LocalS3("blocks")
    yield server
    server.kill()


@pytest.fixture
def start(local, opened):
    """Start an engine on the local server."""

    def start_one(fingerprint=None, **options):
        opened.append(S3Tier(S3Options(**local.place | options), blocks(), fingerprint))
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


def endless(request):
    """Send a listing without an end."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 20))
        request.server.num_sent += 1


@pytest.mark.slow
@pytest.mark.parametrize("act", [announcing(200), endless, None])
def test_deleting_process_has_bounds(local, tier, monkeypatch, act):
    """Neither an endless listing nor an alarm in the process ends an engine or stops its resets."""
    paths = private_blocks(tier, local)
    local.calls.clear()
    local._server.num_sent = 0
    if act is None:
        soon = "from kvcache.tiers import s3; s3._DELETE_S = 1; limit_process()\n"
        monkeypatch.setattr(s3, "_DELETE", s3._DELETE.replace("limit_process()\n", soon))
    local.spoil(act or "hang", "LIST")
    tier.reset()
    wait_for_reset(tier)
    assert (store(tier, KEYS[:2], 60).done, local.calls["GET"]) == (KEYS[:2], 0)
    until(lambda: tier._life.maintain(60) and tier._deletion is None)
    assert (tier.stats().undeleted_blocks, set(paths) <= local.objects.keys()) == (5, True)
    assert ("delete" in tier.stats().last_error, local._server.num_sent < 800) == (act is not None, True)
    local.heal()
    monkeypatch.undo()
    set_credentials(monkeypatch)
    tier._again_s = 0
    until(lambda: tier._life.maintain(60) and not tier.stats().undeleted_blocks)
    assert not set(paths) & local.objects.keys()
    assert load(tier, KEYS[:2], 61).done == KEYS[:2]


def kept(request):
    """Answer as a store that deletes nothing for this user."""
    keys = re.findall(rb"<Key>(.*?)</Key>", request.body)
    errors = b"".join(b"<Error><Key>%b</Key><Code>AccessDenied</Code></Error>" % key for key in keys)
    request.reply(200, b"<DeleteResult>%b</DeleteResult>" % errors)


def odd_key(request):
    """List a key that the library refuses."""
    entry = "<Contents><Key>kvcache//../x</Key><LastModified>x</LastModified><ETag>1</ETag><Size>1</Size></Contents>"
    request.reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>".encode())


@pytest.mark.parametrize(
    ("act", "command"),
    [(refusing(status, "Code"), "LIST") for status in (400, 401, 403, 404, 405, 501, 503)]
    + [(odd_key, "LIST"), (lambda request: request.reply(200, b"no XML"), "LIST"), (kept, "POST")]
    + [(refusing(status, "Code"), "POST") for status in (403, 405, 500)],
)
def test_failed_deletion_is_an_error(local, tier, act, command):
    """Each of them ends the process, and is the line that `maintain` logs."""
    store(tier, KEYS[:2])
    local.spoil(act, command)
    with pytest.raises(OSError, match="s3://blocks at http://127"):
        s3.delete_under(S3Options(**local.place), "kvcache/")


REFUSED = "AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidSecurity NotSignedUp"
REFUSED += " SignatureDoesNotMatch UnauthorizedAccess"
PASSING = """
    AccessControlListNotSupported AccessForbidden AccessPointAlreadyOwnedByYou AmbiguousGrantByEmailAddress
    AuthorizationHeaderMalformed AuthorizationQueryParametersError BadDigest BadRequest BucketAlreadyExists
    BucketAlreadyOwnedByYou BucketNotEmpty ClientTokenConflict ConditionalRequestConflict
    ConnectionClosedByRequester CredentialsNotSupported CrossLocationLoggingProhibited DeviceNotActiveError
    EndpointNotFound EntityTooLarge EntityTooSmall ExpiredToken ExpiredTokenException
    IllegalLocationConstraintException IllegalVersioningConfigurationException IncompleteBody IncorrectEndpoint
    InternalError InvalidAccessPoint InvalidArgument InvalidBucket InvalidBucketName InvalidBucketState
    InvalidDigest InvalidEncryptionAlgorithmError InvalidHostHeader InvalidHttpMethod InvalidLocationConstraint
    InvalidNamespaceHeader InvalidObjectState InvalidPayer InvalidRange InvalidRegion InvalidRequest
    InvalidSignature InvalidStorageClass InvalidTag InvalidTargetBucketForLogging InvalidToken InvalidURI
    KeyTooLongError KMS.DisabledException MalformedACLError MalformedPOSTRequest MalformedXML
    MaxMessageLengthExceeded MetadataTooLarge MethodNotAllowed MissingAttachment MissingAuthenticationToken
    MissingContentLength MissingRequestBodyError MissingSecurityElement MissingSecurityHeader
    MissingUploadObjectWithObjectLockHeaders NoLoggingStatusForKey NoSuchAccessPoint
    NoSuchPublicAccessBlockConfiguration NotImplemented NotModified ObjectLockConfigurationNotFoundError
    OperationAborted PermanentRedirect PreconditionFailed Redirect RequestExpired RequestIsNotMultiPartContent
    RequestLimitExceeded RequestTimeout RequestTimeTooSkewed ServerNotInitialized ServiceUnavailable SlowDown
    SlowDownRead SlowDownWrite TemporaryRedirect ThrottlingException TokenCodeInvalidError TokenRefreshRequired
    TooManyRequests UnexpectedContent XMinioServerNotInitialized
"""


def test_every_code_has_one_meaning(local, tier, monkeypatch):
    """A code means the same with each status; an answer without one refuses no credentials."""
    moto = pytest.importorskip("moto.s3.exceptions")
    codes = set(re.findall(r'__init__\(\s*"(\w+)"', Path(moto.__file__).read_text()))
    assert (s3.REFUSED, codes - set(PASSING.split()) - s3.REFUSED) == (set(REFUSED.split()), set())
    monkeypatch.setattr(s3_wire, "_BACKOFF_S", 0.0)
    meanings = dict.fromkeys(PASSING.split(), OSError) | dict.fromkeys(s3.REFUSED, PermissionError)
    bodies = {f"<Error><Code>{code}</Code></Error>": error for code, error in meanings.items()}
    bodies["<Error><Code>NoSuchBucket</Code></Error>"] = FileNotFoundError
    bodies["<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"] = OSError
    answers = [(status, *item) for status in (400, 401, 403, 409) for item in bodies.items()]
    answers += [
        (status, "<html>AccessDenied</html>", OSError) for status in (301, 307, *range(400, 600)) if status != 404
    ]
    for status, body, error in answers:
        local.spoil(lambda request, status=status, body=body: request.reply(status, body.encode()))
        with pytest.raises(OSError, match="s3://blocks at http://127") as caught:
            tier.read_epoch()
        assert type(caught.value) is error, (status, body)


IN_PLACE = """
    access_key_id secret_access_key session_token region default_region imdsv1_fallback metadata_endpoint role_arn
    container_credentials_relative_uri container_credentials_full_uri container_authorization_token_file endpoint
    role_session_name sts_endpoint web_identity_token_file virtual_hosted_style_request endpoint_url_s3
"""
UNUSED = "bucket unsigned_payload checksum_algorithm conditional_put copy_if_not_exists disable_tagging"
UNUSED += " disable_bulk_delete"


def test_environment_of_library_is_known(local, start, monkeypatch):
    """Each variable that the library reads is followed by both clients, replaced, of no use to a tier, or refused."""
    stub = Path(s3.obstore.__file__).with_name("_store") / "_aws.pyi"
    (config,) = [node for node in ast.parse(stub.read_text()).body if getattr(node, "name", "") == "S3Config"]
    names = {node.target.id.removeprefix("aws_") for node in config.body if isinstance(node, ast.AnnAssign)}
    refused = {name.removeprefix("AWS_").lower() for name in s3.NOT_FOLLOWED}
    assert sorted(names) == sorted([*IN_PLACE.split(), *UNUSED.split(), *refused])
    for name in s3.NOT_FOLLOWED:
        monkeypatch.setenv(name, "true")
        with pytest.raises(ValueError, match=f"do not follow the environment's {name}"):
            start()
        monkeypatch.delenv(name)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, local.endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(ValueError, match="is not encrypted: to use it, name it as"):
            S3Tier(S3Options(bucket="blocks"), blocks())
        assert not local.objects
        # The option comes before it.
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        tier = start()
        assert (store(tier, KEYS[:2]).error, found(start(), KEYS[:2])) == ("", 2)
        local.objects.clear()
        monkeypatch.delenv(name)


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


@pytest.mark.parametrize("is_open", [True, False])
def test_missing_descriptors_log_one_line(local, start, caplog, capfd, is_open):
    store(start(), KEYS[:4])
    tier = start()
    if not is_open:
        # As after a start without them.
        tier._query_loop.end()
        tier._query_loop = None
    # Connections that are kept would need none.
    local.kill()
    local.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert tier._life.maintain(60)
        for number in range(20):
            assert not tier.lookup([b"%d" % number])
            until(lambda: tier.get_finished() == [] and not tier._life.catalog._existence._asked)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (len(caplog.records), *capfd.readouterr()) == (1, "", "")
    assert tier.stats().io_errors >= 1
    assert tier._life.maintain(60)
    assert found(tier, KEYS[:4]) == 4


def private_blocks(tier, local):
    """Make the tier's epoch private, store blocks, and return their paths."""
    tier.reset()
    wait_for_reset(tier)
    store(tier, KEYS[:5], 50)
    return [path_of(tier, key) for key in KEYS[:5]]


def test_reset_deletes_private_blocks(local, tier, tmp_path, monkeypatch):
    store(tier, KEYS[:3])
    paths = private_blocks(tier, local)
    foreign = {"kvcache": b"", f"{paths[0].rpartition('/')[0]}2/{KEYS[0].hex()}": b"another epoch's"}
    local.objects.update(foreign)
    # The listing may hide a name that is there.
    hidden = local.objects.pop(paths[0])
    before = local.objects.keys() - set(paths)
    # A module of a directory in which anybody may write.
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    tier.reset()
    wait_for_reset(tier)
    until(lambda: tier._life.maintain(60) and not tier.stats().undeleted_blocks)
    assert (local.objects.keys(), tier.stats().io_errors) == (before, 0)
    local.objects[paths[0]] = hidden
    assert found(tier, KEYS[:5]) == 0


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
