"""Defines the frames between a fetching child and its parent: a FetchSetup, then FetchJobs and answers."""

from typing import TypeAlias

import msgspec


class FetchSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts that may be asked, and the limits of one file."""

    memory_bytes: int  # of address space
    hosts: frozenset[str]
    max_bytes: int
    seconds: float


class FetchJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A URL to fetch."""

    url: str


class Fetched(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The file behind a URL."""

    data: bytes


class Unfetched(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Why a URL is not fetched, without the name of its field."""

    message: str


FetchAnswer: TypeAlias = Fetched | Unfetched
