"""Which model answers a request, by the name, the revision and the key that it brings."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.process.model_table import LaneEntry, LaneState
from tests.services.gateway.fake_ring import MODEL, manager_of, settings


class OneLane:
    """A model without a ring."""

    def __init__(self, name: str, revision: str, max_adapters: int = 0) -> None:
        limits = Limits(context_length=1000, vocab_size=100, max_adapters=max_adapters)
        chosen = settings(model=dataclasses.replace(MODEL, id=name, revision=revision), limits=limits)
        self.manager: RequestManager = manager_of(chosen, lambda message: None, Quotas(lambda _: TenantLimits(), 1))
        self.manager.refusal = None
        self.detached = DetachedSessions(self.manager, asyncio.get_running_loop().call_later, 4)
        self.is_leaving = False


class Bench:
    """Three models, of which two share an alias."""

    def __init__(self, weights: dict[str, int] | None = None) -> None:
        self.lanes = {f"m{at}": OneLane(name, f"r{at}") for at, name in enumerate(("a", "b", "c"))}
        self.models = Models(self.lanes, self.lanes["m0"].manager.books)
        self.models.aliases = {"chat": weights or {"a": 9, "b": 1}}

    def named(self, name: str | None, revision: str = "", key: str = "") -> str:
        return self.models.choose(name, revision, key).manager.settings.model.id


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_name_an_alias_and_no_name(bench: Bench) -> None:
    assert [bench.named(name) for name in ("a", "b", "c", None)] == ["a", "b", "c", "a"]
    bench.models.default = "c"
    assert bench.named(None) == "c"
    bench.models.aliases = {"chat": {"b": 1}}
    assert bench.named("chat") == "b"


@pytest.mark.parametrize("name", ["", "d", "a:x", "A"])
async def test_an_unknown_model_is_told_which_there_are(bench: Bench, name: str) -> None:
    with pytest.raises(ServiceError, match="this server serves 'a', 'b', 'c', 'chat'") as refused:
        bench.named(name)
    assert (refused.value.code, refused.value.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_a_canary_gets_its_share_and_keys_stay_with_their_model(bench: Bench) -> None:
    found = [bench.named("chat", key=f"tenant\0{at}") for at in range(10_000)]
    assert 0.08 <= Counter(found)["b"] / 10_000 <= 0.12
    assert found == [bench.named("chat", key=f"tenant\0{at}") for at in range(10_000)]
    moved = Bench({"a": 8, "b": 2})
    again = [moved.named("chat", key=f"tenant\0{at}") for at in range(1000)]
    kept = {new for old, new in zip(found, again, strict=False) if old == "b"}
    assert kept == {"b"}  # a larger canary keeps its own


async def test_a_revision_finds_the_model_that_began_also_while_it_leaves(bench: Bench) -> None:
    assert bench.named("chat", "r1") == "b" and bench.named("chat", "r0") == "a"
    bench.models.aliases = {"chat": {"c": 1}}
    bench.lanes["m0"].is_leaving = True
    assert bench.named("chat", "r0") == "a" and bench.named("a", "r0") == "a"
    assert bench.named("chat") == "c" and bench.named("chat", "unknown") == "c"  # which is refused for its revision
    with pytest.raises(ServiceError, match="this server serves 'b', 'c', 'chat'"):
        bench.named("a")


async def test_a_failed_model_says_why_and_its_share_goes_to_the_others(bench: Bench) -> None:
    bench.models.facts = {"b": LaneEntry("b", "", state=LaneState.FAILED, why="engine-0 ended")}
    bench.lanes["m1"].manager.refusal = ServiceError(Code.UNAVAILABLE, "STAGE_LOST", "lost")
    with pytest.raises(ServiceError, match="'b' is not served at present: engine-0 ended") as refused:
        bench.named("b")
    assert (refused.value.code, refused.value.reason) == (Code.UNAVAILABLE, "MODEL_UNAVAILABLE")
    assert {bench.named("chat", key=str(at)) for at in range(100)} == {"a"}


async def test_adapters_are_found_by_their_base_or_at_the_first_that_takes_any(bench: Bench) -> None:
    bench.lanes["m1"] = OneLane("b", "r1", max_adapters=1)
    bench.lanes["m2"] = OneLane("c", "r2", max_adapters=1)
    assert bench.named("c:poet") == "c" and bench.named("poet") == "b"


async def test_a_request_is_looked_up_where_it_is(bench: Bench) -> None:
    assert bench.models.owner("none") is bench.lanes["m0"]
    bench.lanes.clear()
    with pytest.raises(ServiceError, match="is not known here"):
        bench.models.owner("none")


async def test_a_model_that_is_being_unloaded_is_unknown(bench: Bench) -> None:
    bench.models.facts = {"b": LaneEntry("b", "", state=LaneState.DRAINING)}
    bench.lanes["m1"].is_leaving = True
    with pytest.raises(ServiceError, match="this server serves 'a', 'c'") as refused:
        bench.named("b")
    assert refused.value.code is Code.NOT_FOUND
