"""Makes the requests about models of plain Python values. Pure."""

from collections.abc import Mapping
from typing import TypedDict

from sluice.v1 import control_pb2


class LoadModelOptions(TypedDict, total=False):
    """Options of a load; the contract describes each."""

    source: str
    revision: str
    settings: Mapping[str, str]
    pinned: bool
    adapters: list[str]
    expected_revision: str


def load_request(model: str, options: LoadModelOptions) -> control_pb2.LoadModelRequest:
    """Returns the request of a load. Raises TypeError for an unknown option."""
    unknown = sorted(set(options) - set(LoadModelOptions.__annotations__))
    if unknown:
        known = ", ".join(LoadModelOptions.__annotations__)
        raise TypeError(f"{unknown[0]!r} is no option of a model; there are {known}")
    return control_pb2.LoadModelRequest(model=model, **options)


def unload_request(model: str, grace_s: float | None) -> control_pb2.UnloadModelRequest:
    """Returns the request of an unload."""
    request = control_pb2.UnloadModelRequest(model=model)
    if grace_s is not None:
        request.grace.FromNanoseconds(int(grace_s * 1e9))
    return request


def sleep_request(model: str, grace_s: float | None, level: int | None) -> control_pb2.SleepModelRequest:
    """Returns the request that has a model sleep."""
    request = control_pb2.SleepModelRequest(model=model, level=level)
    if grace_s is not None:
        request.grace.FromNanoseconds(int(grace_s * 1e9))
    return request


def alias_request(alias: str, weights: Mapping[str, int]) -> control_pb2.SetAliasRequest:
    """Returns the request that sets an alias."""
    targets = [control_pb2.AliasTarget(model=model, weight=weight) for model, weight in weights.items()]
    return control_pb2.SetAliasRequest(alias=alias, targets=targets)
