"""Leases: whether a request still has a waiting gateway."""

from sluice_server.services.messages.messages import Envelope
from sluice_server.services.ring.leases import Leases


def envelope(epoch: int) -> Envelope:
    return Envelope("r", "g", epoch=epoch)


def test_a_newer_incarnation_waits_for_nothing_of_the_older() -> None:
    leases = Leases(lease_s=10.0)
    leases.seen("g", 5)
    assert not leases.is_over(envelope(5))
    leases.seen("g", 6)
    assert leases.is_over(envelope(5)) and not leases.is_over(envelope(6))
    leases.seen("g", 5)  # late
    assert leases.is_over(envelope(5))


def test_silence_ends_a_lease() -> None:
    leases = Leases(lease_s=10.0)
    leases.seen("g", 5)
    leases.pass_time(10.0)
    assert not leases.is_over(envelope(5))
    leases.pass_time(0.1)
    assert leases.is_over(envelope(5))
    leases.seen("g", 5)
    assert not leases.is_over(envelope(5))


def test_others_leases_are_their_own() -> None:
    leases = Leases(lease_s=1.0)
    leases.seen("g", 5)
    leases.pass_time(2.0)
    leases.seen("h", 1)
    assert leases.is_over(envelope(5))
    assert not leases.is_over(Envelope("r", "h", epoch=1))
