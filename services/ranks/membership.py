"""Decides whether ranks belong to one group: same start, size, build, model and settings. Pure."""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.parallel.messages import Hello
from sluice_server.services.config import as_text

OWN = frozenset({"threads"})  # settings that each rank may have for itself


def hello_of(config: EngineConfig, rank: int, epoch: int, build: str, checkpoint: str, peers: str = "") -> Hello:
    """Returns what a rank says of itself; `peers`: --rank-peers, where all ranks must have the same."""
    fields = {**dataclasses.asdict(config), "rank_peers": peers}
    settings = {name: as_text(value) for name, value in fields.items() if name not in OWN}
    return Hello(rank, config.num_ranks, epoch, build, checkpoint, settings)


def refusal(own: Hello, other: Hello, known: Mapping[int, object]) -> str:
    """Returns why a rank cannot join the group of rank 0; "" if it can. `known` has the ranks that have joined."""
    who = f"rank {other.rank}"
    if own.epoch and other.epoch and own.epoch != other.epoch:
        return f"{who} belongs to start {other.epoch} of its group, and rank 0 to start {own.epoch}"
    if not 0 < other.rank < own.size:
        return f"{who} is not one of the {own.size} ranks of the group"
    if other.rank in known:
        return f"{who} came twice: two processes have its id"
    for what, mine, its in (
        ("size of the group", own.size, other.size),
        ("version", own.build, other.build),
        ("model's configuration", own.checkpoint, other.checkpoint),
    ):
        if mine != its:
            return f"{who} has another {what}, {its}; rank 0 has {mine}"
    names = sorted(own.settings.keys() | other.settings.keys())
    name = next((one for one in names if own.settings.get(one) != other.settings.get(one)), None)
    if name is None:
        return ""
    flag = f"--{name.replace('_', '-')}"
    return f"{who} has {flag} {other.settings.get(name)!r}, and rank 0 {own.settings.get(name)!r}"


def check_equal(what: str, own: str, others: Mapping[int, str]) -> None:
    """Raises ServiceError if a rank has loaded something else than rank 0."""
    for rank, its in others.items():
        if its != own:
            raise disagreement(f"rank {rank} has loaded another {what}, {its}; rank 0 has {own}")


def disagreement(text: str) -> ServiceError:
    """Returns the error for ranks that cannot compute one model together."""
    return ServiceError(
        Code.FAILED_PRECONDITION, "RANKS_DIFFER", f"{text}; start all ranks with the same files and settings"
    )
