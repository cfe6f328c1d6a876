"""Requests for profiles of a server's processes."""

from typing import TypedDict

from sluice.v1 import control_pb2


class ProfileOptions(TypedDict, total=False):
    """Options of a profile; those that are absent or None are the server's to choose."""

    duration_s: float | None  # to record at most
    steps: int | None  # of an engine, at most
    max_bytes: int | None  # of the file


def profile_request(kind: str, process: str, options: ProfileOptions) -> control_pb2.ProfileRequest:
    """Returns the request. Raises ValueError for an unknown kind."""
    name = "PROFILE_KIND_" + kind.upper().replace("-", "_")
    if name not in control_pb2.ProfileKind.keys():  # noqa: SIM118 # it is no mapping
        raise ValueError(f"{kind!r} is not a kind of profile")
    request = control_pb2.ProfileRequest(process=process, kind=control_pb2.ProfileKind.Value(name))
    duration_s, steps, max_bytes = options.get("duration_s"), options.get("steps"), options.get("max_bytes")
    if duration_s is not None:
        request.duration.FromNanoseconds(int(duration_s * 1e9))
    if steps is not None:
        request.steps = steps
    if max_bytes is not None:
        request.max_bytes = max_bytes
    return request
