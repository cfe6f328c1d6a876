"""The memory of grammars stays within its stated limit, and so does the cache of earlier ones."""

import gc
import random

import psutil
import pytest

from sluice_server.engine.plan import Placement
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.grammars import MAX_KEPT_BYTES, NUM_KEPT, Grammar, Grammars
from sluice_server.engine.sampling.matchers import SlotMatchers
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from tests.oracle.tokenizers import byte_level_bpe

VOCAB, EOS = 420, 1
NUM, TOKENS = 60, 12


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level_bpe(directory)
    return Grammars(load_tokenizer(directory / "tokenizer.json", VOCAB, (EOS,)))


def hostile(number: int) -> str:
    """A short grammar whose automaton grows with every token."""
    return f"start: /(.*a.{{0,12}}){{3}}{number:06d}/"


def follow(matchers: SlotMatchers, source: str, rng: random.Random) -> None:
    """Follows the grammar with random tokens."""
    matchers.reset(Placement(0, SamplingParams(grammar=source), (), 0, tokens=(), num_prompt=0))
    for position in range(TOKENS):
        masks = matchers.start([0], {}).result()
        assert masks is not None and not masks.lost
        words = masks.bits[0].tolist()
        allowed = [token for token in range(3, VOCAB) if words[token // 32] >> token % 32 & 1]
        matchers.note(0, position + 1, [rng.choice(allowed)])


def resident() -> int:
    gc.collect()
    give_back()
    return int(psutil.Process().memory_info().rss)


def test_grammars_take_no_more_than_is_said(grammars: Grammars) -> None:
    """All grammars are held at once, so that their memory is some megabytes and can be measured."""
    matchers, rng = SlotMatchers(grammars, VOCAB, (EOS,)), random.Random(1)
    follow(matchers, hostile(0), rng)
    before = resident()
    held: list[Grammar] = []
    for number in range(1, NUM + 1):
        held.append(grammars.compile(hostile(number)))
        follow(matchers, hostile(number), rng)
    taken = resident() - before
    assert 2 << 20 < taken <= sum(grammar.num_bytes for grammar in held)


def test_what_came_and_went_is_kept_within_bytes(grammars: Grammars) -> None:
    matchers, rng = SlotMatchers(grammars, VOCAB, (EOS,)), random.Random(2)
    sources = [hostile(1000 + number) for number in range(2 * NUM)]
    for source in sources:
        follow(matchers, source, rng)
    found = [grammars.compiled(source) is not None for source in sources]
    assert NUM_KEPT <= sum(found) < NUM and grammars.num_bytes <= MAX_KEPT_BYTES
    assert found[-NUM_KEPT:] == [True] * NUM_KEPT
    assert grammars.take_dropped_bytes() > 0 and grammars.take_dropped_bytes() == 0


def test_memory_grows_with_what_is_followed_and_no_further_than_the_limit() -> None:
    grammar = Grammar("x", None)  # type: ignore[arg-type] # never followed
    fresh = grammar.num_bytes
    grammar.num_masks = 10
    assert fresh < grammar.num_bytes
    grammar.num_masks = 10**9
    assert grammar.num_bytes < 64 << 20
