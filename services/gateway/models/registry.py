"""The models of a gateway, by the names that requests give. Pure.

A name is a model's id, an alias, or an adapter of a model that takes any. An alias may stand for several models, with
weights: which one answers is a function of tenant and idempotency key, so that repetitions stay with it. A request that
names a revision goes to a model that has it, also to one that is being unloaded: so a stream is continued by the model
that began it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeAlias, TypeVar

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import ModelInfo
from sluice_server.services.process.model_table import LaneEntry, LaneState

MOST_NAMED = 16  # models that an error names
SHARES = 1 << 32
Aliases: TypeAlias = Mapping[str, Mapping[str, int]]  # weights by model, by alias


class Served(Protocol):
    """One model, as a request for it needs it."""

    @property
    def manager(self) -> RequestManager:
        """Its open requests."""

    @property
    def detached(self) -> DetachedSessions:
        """Its generations that may outlive their readers."""

    @property
    def is_leaving(self) -> bool:
        """Whether it is being unloaded: no name leads to it any more."""


_L = TypeVar("_L", bound=Served, covariant=True)


class Models(Generic[_L]):
    """The models, by lane. The mapping is its owner's, who changes it.

    Attributes:
        books: what the requests of all of them share.
        default: the name that a request without one has; "" for the first model.
        aliases: the models that each alias stands for, by their ids.
        facts: by id, what the service says of each model that it has.
    """

    def __init__(self, lanes: Mapping[str, _L], books: Books) -> None:
        self.books = books
        self.default = ""
        self.aliases: Aliases = {}
        self.facts: Mapping[str, LaneEntry] = {}
        self._lanes = lanes

    def __iter__(self) -> Iterator[_L]:
        return iter(tuple(self._lanes.values()))

    @property
    def first(self) -> _L:
        """The model of requests that name none. Raises `ServiceError` MODEL_NOT_FOUND where there is none."""
        return self.choose(None)

    def of(self, model: str) -> _L | None:
        """Returns the model with this id, also one that is being unloaded; None if it is not served here."""
        return next((one for one in self if _info(one).id == model), None)

    def named(self, name: str) -> _L:
        """Returns the model that this name leads to. Raises `ServiceError` MODEL_NOT_FOUND."""
        return self.choose(name)

    def allows(self, tenant: str, one: Served) -> bool:
        """Whether requests of a tenant may reach a model, by its id or an alias."""
        model = _info(one)
        return self.books.allows_model(tenant, (model.id, *model.aliases))

    def chosen_for(self, tenant: str, name: str | None, revision: str = "", key: str = "") -> _L:
        """Returns the model that answers a request of a tenant. Raises as `choose`; a model that the tenant may not use
        is unknown to it."""
        try:
            one = self.choose(name, revision, key)
            is_known = self.allows(tenant, one)
        except ServiceError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            is_known = False
        if is_known:
            return one
        allowed = [each for each in self._all() if self.allows(tenant, each)]
        names = dict.fromkeys(name for each in allowed for name in sorted(_info(each).aliases))
        raise unknown_model(name or "", [*(_info(each).id for each in allowed), *names])

    def choose(self, name: str | None, revision: str = "", key: str = "") -> _L:
        """Returns the model that a name leads to. `name`: as the request gives it; `key`: equal ones lead to the
        same model of an alias. Raises `ServiceError` MODEL_NOT_FOUND, or MODEL_UNAVAILABLE for one that the service
        has and cannot serve."""
        wanted = self.default if name is None else name
        found = self._all()[:1] if name is None and not self.default else self._behind(wanted)
        if revision and not any(has_revision(one, revision) for one in found):
            # An alias may have stood for it, and a model that is being unloaded may have the name.
            having = [one for one in self if has_revision(one, revision)]
            found = [one for one in having if wanted in self.aliases or _info(one).id == wanted] or found
        elif revision:
            found = [one for one in found if has_revision(one, revision)]
        found = [one for one in found if not self._has_failed(one)]
        if not found:
            raise self._unknown(wanted)
        return found[0] if len(found) == 1 else self._by_weight(wanted, found, key)

    def owner(self, request_id: str) -> _L:
        """Returns the model that has, or had, a request; the first one if none does."""
        for one in self:
            if request_id in one.detached or one.manager.requests.get(request_id) is not None:
                return one
        return next((one for one in self if one.manager.requests.is_known(request_id)), None) or self.first

    def ids(self) -> list[str]:
        """Returns the ids of the models that names lead to, in the order in which they were loaded."""
        return [_info(one).id for one in self._all()]

    def _all(self) -> list[_L]:
        return [one for one in self if not one.is_leaving]

    def _behind(self, name: str) -> list[_L]:
        weights = self.aliases.get(name)
        if weights is not None:
            return [one for one in self._all() if weights.get(_info(one).id)]
        exact = [one for one in self._all() if _info(one).id == name]
        if exact:
            return exact
        takers = [one for one in self._all() if one.manager.settings.limits.max_adapters]
        of_base = [one for one in takers if name.startswith(f"{_info(one).id}:")]
        return of_base or [one for one in takers if one.manager.adapters.is_known(name)] or takers[:1]

    def _by_weight(self, alias: str, found: "list[_L]", key: str) -> _L:
        weights = [self.aliases.get(alias, {}).get(_info(one).id, 1) for one in found]
        digest = hashlib.blake2b(f"{alias}\0{key}".encode(), digest_size=4).digest()
        at = int.from_bytes(digest) * sum(weights) // SHARES
        for one, weight in zip(found, weights, strict=True):
            at -= weight
            if at < 0:
                return one
        raise AssertionError("a share below the sum of the weights is within one of them")

    def _has_failed(self, one: Served) -> bool:
        """Whether a model's processes end again and again, and no request can be sent to it."""
        fact = self.facts.get(_info(one).id)
        return fact is not None and fact.state is LaneState.FAILED and one.manager.refusal is not None

    def _unknown(self, name: str) -> ServiceError:
        named = (name, *self.aliases.get(name, ()))
        facts = [self.facts[one] for one in named if one in self.facts]
        fact = next((one for one in facts if one.state is not LaneState.DRAINING), None)
        if fact is not None:
            return unavailable(name, fact.why)
        return unknown_model(name, [*self.ids(), *self.aliases])


def unavailable(name: str, why: str) -> ServiceError:
    """Returns the error of requests for a model that the service has and cannot serve."""
    text = f"model {name!r} is not served at present: {why or 'its files cannot be read by this gateway'}"
    return ServiceError(Code.UNAVAILABLE, "MODEL_UNAVAILABLE", text, details={"model": name}, retry_after_s=1.0)


def unknown_model(name: str, served: "list[str]") -> ServiceError:
    """Returns the error for a model that is not served; it names those that are."""
    shown = ", ".join(map(repr, served[:MOST_NAMED]))
    more = f" and {len(served) - MOST_NAMED} more" if len(served) > MOST_NAMED else ""
    return not_found("model", name, f"this server serves {shown}{more}" if served else "this server serves none")


def has_revision(one: Served, revision: str) -> bool:
    """Whether a model has this revision, or the operator's name of one."""
    model = _info(one)
    return revision in (model.revision, model.label) and bool(revision)


def _info(one: Served) -> ModelInfo:
    return one.manager.settings.model
