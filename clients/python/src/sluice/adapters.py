"""Makes the requests about adapters of plain Python values. Pure."""

from typing import TypedDict

from sluice.v1 import control_pb2

MAX_PAGE = 1000  # adapters of one answer


class LoadAdapterOptions(TypedDict, total=False):
    """Options of a load; the contract describes each."""

    base_model: str
    pinned: bool
    expected_digest: str


def load_request(name: str, path: str | None, options: LoadAdapterOptions) -> control_pb2.LoadAdapterRequest:
    """Returns the request of a load. Raises TypeError for an unknown option."""
    unknown = sorted(set(options) - set(LoadAdapterOptions.__annotations__))
    if unknown:
        known = ", ".join(LoadAdapterOptions.__annotations__)
        raise TypeError(f"{unknown[0]!r} is no option of an adapter; there are {known}")
    request = control_pb2.LoadAdapterRequest(adapter=name, path=path, **options)
    return request


def unload_request(name: str, grace_s: float | None) -> control_pb2.UnloadAdapterRequest:
    """Returns the request of an unload."""
    request = control_pb2.UnloadAdapterRequest(adapter=name)
    if grace_s is not None:
        request.grace.FromNanoseconds(int(grace_s * 1e9))
    return request
