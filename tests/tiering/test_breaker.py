"""A breaker opens after failures in a row, and closes when the one job that tries succeeds."""

from kvcache.tiering.breaker import Direction


def test_breaker_goes_from_closed_to_open_to_half_open_and_back():
    breaker = Direction("reads", 1, max_failures=2, pause_s=10.0)
    assert (breaker.state, breaker.allows(0.0)) == ("closed", True)
    assert not breaker.record_failure(0.0)
    breaker.record_success()
    assert not breaker.record_failure(0.0)
    assert breaker.record_failure(1.0)
    assert (breaker.state, breaker.allows(10.9), breaker.allows(11.0)) == ("open", False, True)
    breaker.record_sent()
    assert (breaker.state, breaker.allows(12.0)) == ("half_open", False)
    assert not breaker.record_failure(12.0)
    assert (breaker.state, breaker.allows(21.9)) == ("open", False)
    breaker.record_sent()
    breaker.record_success()
    assert (breaker.state, breaker.allows(12.0)) == ("closed", True)


def test_breaker_opens_at_once_when_told():
    breaker = Direction("reads", 1, max_failures=9, pause_s=1.0)
    assert breaker.record_failure(0.0, at_once=True)
    assert breaker.state == "open"
