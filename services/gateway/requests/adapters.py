"""Gives requests the adapter that they name, before they are sent into the ring.

A request that names an adapter is never sent without it.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.engine.request import AdapterRef
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.messages.work import Generate


class AdapterSource(Protocol):
    """The adapters that requests may name."""

    def is_known(self, name: str) -> bool:
        """Returns whether the name has an adapter, or is about to."""

    def find(self, name: str, tenant: str) -> AdapterRef | None:
        """Returns the adapter of that name; None if it is to be loaded first. Raises ServiceError."""

    def when_loaded(self, name: str, tell: Callable[[AdapterRef | ServiceError], None]) -> None:
        """Calls `tell` when the adapter has been loaded. Raises ServiceError if it cannot even be tried."""


class NoAdapters:
    """The source of a gateway whose requests name none."""

    def is_known(self, name: str) -> bool:
        """Returns False."""
        return False

    def find(self, name: str, tenant: str) -> AdapterRef | None:
        """Raises ServiceError."""
        raise unsupported("adapter", "adapter: this server was not started with --max-adapters: leave it out")

    def when_loaded(self, name: str, tell: Callable[[AdapterRef | ServiceError], None]) -> None:
        """Does nothing: `find` has refused the request."""


def bound(asked: TranslatedRequest, found: AdapterRef) -> TranslatedRequest:
    """Returns a request with its adapter. Raises ServiceError if it is to be continued with another one."""
    assert isinstance(asked.work, Generate), "only generations name adapters"
    if asked.adapter_digest not in ("", found.digest.hex()):
        raise _other(asked.adapter, asked.adapter_digest, found.digest.hex())
    return dataclasses.replace(asked, work=msgspec.structs.replace(asked.work, adapter=found))


class Unbound(Protocol):
    """A request that waits for its adapter."""

    @property
    def asked(self) -> TranslatedRequest:
        """What was asked."""

    @property
    def outcome(self) -> object | None:
        """How it ended; None while it is open."""

    def bind(self, asked: TranslatedRequest) -> None:
        """Takes the request with its adapter."""

    def end(self, outcome: ServiceError) -> bool:
        """Ends the request with an error."""


_R = TypeVar("_R", bound=Unbound)


def when_bound(request: _R, source: AdapterSource, send: Callable[[_R], None]) -> None:
    """Calls `send` once a request's adapter is loaded, or ends the request with the error of the load."""

    def told(found: AdapterRef | ServiceError) -> None:
        if request.outcome is not None:
            return
        try:
            if isinstance(found, ServiceError):
                raise found.with_traceback(None)
            request.bind(bound(request.asked, found))
        except ServiceError as error:
            request.end(error)
            return
        send(request)

    try:
        source.when_loaded(request.asked.adapter, told)
    except ServiceError as error:
        request.end(error)


def is_unbound(asked: TranslatedRequest) -> bool:
    """Whether a request names an adapter that it has not got yet."""
    return bool(asked.adapter) and isinstance(asked.work, Generate) and asked.work.adapter is None


def digest_of(asked: TranslatedRequest) -> str:
    """Returns the digest of a request's adapter in hex; "" without one."""
    work = asked.work
    return work.adapter.digest.hex() if isinstance(work, Generate) and work.adapter is not None else ""


def _other(name: str, wanted: str, served: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "ADAPTER_CHANGED",
        f"the generation began with the adapter {name!r} of digest {wanted[:16]}…, and that name now has {served[:16]}…"
        ": start it again",
        field="resume.adapter_digest",
        details={"limit": served, "actual": wanted},
    )
