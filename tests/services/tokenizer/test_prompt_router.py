"""The router of a tokenizer: which engine gets a prompt, and what follows it."""

import msgspec

from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.prefix import names_of, start_of, tenant_root
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import CachedBlock, Load
from sluice_server.services.messages.messages import Cancel, Envelope, Grant, Message, Prompt, Submit
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Report
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TokenPrompt, pack_ids
from sluice_server.services.tokenizer.prompt_router import MAX_REMEMBERED, PromptRouter

IDENTITY = CacheIdentity(b"weights", dtype="float32")
OTHER = CacheIdentity(b"weights of a later revision", dtype="float32")
IDS = list(range(10))
BLOCK = 4
BOTH = ("e0", "e1")


START = tenant_root(IDENTITY.encoded(), "acme")


class Rig:
    """A router of two engines, its clock, and what it says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: list[Message] = []
        self.router = PromptRouter("t0", BOTH, BLOCK, self.said.append, lambda: self.now_s)

    def report(
        self, engine: str, epoch: int = 1, token_s: float = 0.0, identity: CacheIdentity | None = IDENTITY
    ) -> None:
        load, encoded = Load(token_s=token_s), identity.encoded() if identity else b""
        self.router.report(Report(engine, epoch, load, served_token=True, cache_identity=encoded))

    def holds(
        self,
        engine: str,
        ids: list[int],
        epoch: int = 1,
        number: int = 0,
        start: bytes = START,
    ) -> None:
        names = names_of(start, ids, BLOCK)
        blocks = tuple(CachedBlock(name, b"", "", b"") for name in names)
        self.router.cached(CacheChanges(engine, epoch, number, is_whole=not number, added=blocks))

    def route(
        self,
        at: str = "e0",
        able: tuple[str, ...] = BOTH,
        name: str = "00",
        embeds: PromptEmbeds | None = None,
        beside: str = "",
        **scheduling: bool,
    ) -> str:
        """The engine of a prompt that the gateway gave to `at`."""
        envelope = Envelope(name, "g0", tenant="acme", engine=at)
        held = Scheduling(**scheduling)
        prompt = Prompt(envelope, pack_ids(IDS), SamplingParams(), Stops(), held, 0.0, embeds=embeds)
        submit = Submit(envelope, Generate(TokenPrompt(pack_ids(IDS)), SamplingParams()), able=able, beside=beside)
        routed, _ = self.router.route(submit, prompt)
        return routed.envelope.engine


def test_a_prompt_goes_to_the_engine_that_holds_its_prefix() -> None:
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
    rig.holds("e0", [])
    rig.holds("e1", IDS)
    assert {rig.route(at=engine) for engine in BOTH} == {"e1"}


def test_the_gateways_choice_stands_where_it_leaves_none() -> None:
    rig = Rig()
    rig.report("e1")
    rig.holds("e1", IDS)
    assert rig.route("e0", able=()) == "e0"
    assert rig.route("e0", able=("e0",)) == "e0"


def test_blocks_of_other_tenants_do_not_count_nor_do_any_for_who_bypasses_caches() -> None:
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
    rig.holds("e0", [])
    rig.holds("e1", IDS, start=tenant_root(IDENTITY.encoded(), "other"))
    assert {rig.route() for _ in range(2)} == {"e0", "e1"}
    rig.now_s = 100.0  # both are idle again
    rig.holds("e1", IDS, number=1)
    assert {rig.route(bypasses_cache=True) for _ in range(2)} == {"e0", "e1"}


def test_blocks_of_placeholders_are_those_of_the_same_embeddings_only() -> None:
    given, other = (PromptEmbeds(bytes([value] * 8), EmbedsType.FLOAT32, 1) for value in (1, 2))
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
    rig.holds("e0", [])
    rig.holds("e1", IDS, start=start_of(START, embeds=given.digest))
    assert {rig.route(embeds=given) for _ in range(3)} == {"e1"}
    for embeds in (other, None):
        rig.now_s += 100.0  # both are idle again
        assert {rig.route(embeds=embeds) for _ in range(2)} == {"e0", "e1"}


def test_blocks_are_named_by_the_identity_of_the_engine_that_holds_them() -> None:
    own = {"e0": IDENTITY, "e1": OTHER}
    for holder, other in (BOTH, BOTH[::-1]):
        rig = Rig()
        for engine in (holder, other):  # who reported last must not matter
            rig.report(engine, identity=own[engine])
        rig.holds(holder, IDS, start=tenant_root(own[holder].encoded(), "acme"))
        rig.holds(other, [])
        assert {rig.route(at=engine) for engine in BOTH} == {holder}


def test_an_engine_that_started_again_names_blocks_by_its_new_identity() -> None:
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
        rig.holds(engine, [])
    rig.report("e1", epoch=2, identity=OTHER)
    rig.report("e0")
    rig.holds("e1", IDS, epoch=2)  # names that its prompts no longer have
    assert {rig.route() for _ in range(2)} == {"e0", "e1"}
    rig.now_s = 100.0  # both are idle again
    rig.holds("e1", IDS, epoch=2, number=1, start=tenant_root(OTHER.encoded(), "acme"))
    assert {rig.route(at=engine) for engine in BOTH} == {"e1"}


def test_no_block_counts_of_an_engine_that_ceased_to_name_its_blocks() -> None:
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
        rig.holds(engine, [])
    rig.report("e1", epoch=2, identity=None)
    rig.holds("e1", IDS, epoch=2)
    assert {rig.route() for _ in range(2)} == {"e0", "e1"}


def test_what_follows_a_prompt_goes_to_its_engine() -> None:
    rig = Rig()
    rig.report("e1")
    rig.holds("e1", IDS)
    assert rig.route("e0") == "e1"
    envelope = Envelope("00", "g0", tenant="acme", engine="e0")
    for message in (Grant(envelope, 3), Cancel(envelope, 1), Cancel(envelope)):
        assert rig.router.follow(message).envelope.engine == "e1"
    assert rig.router.follow(Grant(envelope, 3)).envelope.engine == "e0"  # it has ended
    rig.route("e0")
    later = msgspec.structs.replace(envelope, attempt=1)
    assert rig.router.follow(Cancel(later)).envelope.engine == "e0"


def test_a_second_attempt_goes_to_another_engine_than_the_first() -> None:
    rig = Rig()
    rig.report("e1")
    rig.holds("e1", IDS)
    assert [rig.route(name="00"), rig.route(name="01", beside="00")] == ["e1", "e0"]
    assert rig.route(at="e1", name="02", beside="01") == "e1"  # also where the gateway had it right
    second = Envelope("01", "g0", tenant="acme", engine="e1")
    assert rig.router.follow(Cancel(second)).envelope.engine == "e0"


def test_what_is_remembered_is_bounded() -> None:
    rig = Rig()
    rig.report("e1")
    rig.holds("e1", IDS)
    for number in range(MAX_REMEMBERED + 1):
        rig.now_s += 1.0
        assert rig.route("e0", name=f"{number:08x}") == "e1"
    first, second = (Envelope(f"{number:08x}", "g0", engine="e0") for number in range(2))
    assert rig.router.follow(Cancel(first)).envelope.engine == "e0"
    assert rig.router.follow(Cancel(second)).envelope.engine == "e1"


def test_an_engine_whose_blocks_are_not_known_is_asked_but_not_all_the_time() -> None:
    rig = Rig()
    for _ in range(3):
        rig.report("e0")
    assert rig.said == [CacheQuery("t0")]
    rig.now_s += 1.0
    rig.report("e0")
    assert len(rig.said) == 2
    rig.holds("e0", IDS)
    rig.now_s += 1.0
    rig.report("e0")
    assert len(rig.said) == 2
    rig.holds("e0", IDS, number=7)  # a gap
    assert len(rig.said) == 3


def test_an_engine_that_started_again_has_an_empty_cache_and_queue() -> None:
    rig = Rig()
    for engine in BOTH:
        rig.report(engine)
        rig.holds(engine, [])
    rig.holds("e1", IDS, number=1)
    assert rig.route() == "e1"
    rig.report("e1", epoch=2)
    rig.report("e1", epoch=1)  # late
    assert {rig.route() for _ in range(2)} == {"e0", "e1"}


def test_a_slow_engine_loses_its_prefix_to_a_fast_one_that_is_idle() -> None:
    rig = Rig()
    rig.report("e0")
    rig.report("e1", token_s=10.0)
    rig.holds("e0", [])
    rig.holds("e1", IDS)
    assert [rig.route() for _ in range(6)].count("e0") > 0
    rig.now_s = 5.0  # e1 has hardly begun
    assert rig.route() in BOTH


def test_engines_join_and_leave() -> None:
    rig = Rig()
    rig.holds("e0", IDS)
    rig.router.change(("e1", "e2"))
    for engine in ("e1", "e2"):
        rig.report(engine)
        rig.holds(engine, [])
    rig.holds("e2", IDS, number=1)
    assert rig.route(at="e1", able=("e0", "e1", "e2")) == "e2"  # e0 serves, the gateway still believes
    rig.router.change(("e0", "e1"))
    rig.report("e0", epoch=1)
    assert rig.route(at="e1", able=("e0", "e1")) in ("e0", "e1")
