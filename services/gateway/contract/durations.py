"""Converts between the contract's Durations and seconds. Pure."""

from google.protobuf.duration_pb2 import Duration

from sluice_server.engine.errors import invalid


def to_seconds(field: str, asked: Duration, high_s: float, low_s: float | None = None) -> float:
    """Converts a Duration in [`low_s`, `high_s`], or in (0, `high_s`] where `low_s` is None. Raises `ServiceError`."""
    found = asked.seconds + asked.nanos / 1e9
    is_low = found <= 0 if low_s is None else found < low_s
    if is_low or found > high_s:
        bounds = f"(0, {high_s:g}]" if low_s is None else f"[{low_s:g}, {high_s:g}]"
        raise invalid(field, f"{found} s is not in {bounds}", limit=low_s or 0 if is_low else high_s)
    return found


def to_duration(seconds: float) -> Duration:
    """Converts seconds to a Duration; negative values become 0."""
    whole_s, nanos = divmod(int(max(0.0, seconds) * 1e9), 10**9)
    return Duration(seconds=whole_s, nanos=nanos)
