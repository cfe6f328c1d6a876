"""Token masks of grammars: exactly the allowed ids, row by row and behind drafts; a reused slot has no old state."""

from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.plan import Placement
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling import grammars as grammars_module
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.sampling.matchers import SlotMatchers
from sluice_server.engine.sampling.rows import GrammarMasks
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from tests.oracle.tokenizers import byte_level_bpe, unigram

VOCAB, EOS = 420, 1  # wider than the tokenizer
WORDS = ("hello", "help", "world", "he said")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizer")
    return directory / "tokenizer.json", byte_level_bpe(directory)


@pytest.fixture(scope="module")
def known(tokenizer: tuple[Path, Tokenizer]) -> Tokenizer:
    return tokenizer[1]


@pytest.fixture
def grammars(tokenizer: tuple[Path, Tokenizer]) -> Grammars:
    return Grammars(load_tokenizer(tokenizer[0], VOCAB, (EOS,)))


@pytest.fixture
def matchers(grammars: Grammars) -> SlotMatchers:
    return SlotMatchers(grammars, VOCAB, (EOS,))


def choice(*words: str) -> str:
    return LLMatcher.grammar_from_regex("|".join(words))


def place(slot: int, grammar: str, tokens: tuple[int, ...] = (), num_prompt: int = 0) -> Placement:
    return Placement(slot, SamplingParams(grammar=grammar), (), 0, tokens=tokens, num_prompt=num_prompt)


def allowed(masks: GrammarMasks | None, row: int) -> set[int]:
    assert masks is not None
    words = masks.bits[masks.rows.tolist().index(row)].tolist()
    return {at * 32 + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def filled(matchers: SlotMatchers, slots: list[int], ahead: dict[int, list[int]] | None = None) -> GrammarMasks | None:
    return matchers.start(slots, ahead or {}).result()


def may_follow(tokenizer: Tokenizer, written: str, words: tuple[str, ...]) -> set[int]:
    """The allowed ids, found by trying every id."""
    found = {EOS} if written in words else set()
    for token in range(tokenizer.get_vocab_size()):
        piece = tokenizer.decode([token], skip_special_tokens=False)
        if token > 2 and piece and any(word.startswith(written + piece) for word in words):
            found.add(token)
    return found


def test_masks_hold_what_may_follow_and_nothing_else(matchers: SlotMatchers, known: Tokenizer) -> None:
    """Where the text is fixed, the allowed ids are those that the tokenizer gives for it."""
    for word in WORDS:
        ids = [*known.encode(word).ids, EOS]
        for num in range(len(ids)):
            matchers.reset(place(0, choice(*WORDS), (7, 8, *ids[:num]), 2))
            masks = filled(matchers, [0])
            expected = may_follow(known, known.decode(ids[:num]), WORDS)
            assert {ids[num]} <= allowed(masks, 0) <= expected
            assert masks is not None and masks.ends == ({0} if allowed(masks, 0) == {EOS} else set())
    matchers.reset(place(0, choice("[a-c]b?")))
    assert allowed(filled(matchers, [0]), 0) == may_follow(known, "", ("a", "b", "c", "ab", "bb", "cb"))


def test_following_is_the_same_token_by_token(matchers: SlotMatchers, known: Tokenizer) -> None:
    ids = known.encode("hello").ids
    matchers.reset(place(0, choice(*WORDS), (7,), 1))
    for num, token in enumerate(ids, 1):
        matchers.note(0, 1 + num, [token])
        matchers.note(0, 1 + num, [token])  # the same step once more, as after a failed one
    assert allowed(filled(matchers, [0]), 0) == {EOS}


def test_masks_behind_tokens_just_sampled_are_there_when_they_are_asked_for(
    matchers: SlotMatchers, known: Tokenizer
) -> None:
    ids = known.encode("he said").ids
    for slot in (0, 1):
        matchers.reset(place(slot, choice(*WORDS), (7,), 1))
    for num, token in enumerate(ids, 1):
        matchers.expect([(0, num, token), (5, num, token)])  # slot 5 follows nothing
        for slot in (0, 1):
            matchers.note(slot, 1 + num, [token])
        early = matchers.start([0], {})
        assert early.done()
        assert allowed(early.result(), 0) == allowed(filled(matchers, [1]), 0)
        draft = [*ids, EOS][num]
        both, behind = (filled(matchers, slots, {1: [draft]}) for slots in ([0, 0, 1], [1, 1, 0]))
        assert [allowed(both, row) for row in range(3)] == [allowed(behind, row) for row in range(3)]
    matchers.expect([(0, 1 + len(ids), EOS)])
    assert allowed(filled(matchers, [0]), 0) == {EOS}


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_a_step_that_is_computed_again_samples_by_the_mask_it_had(
    matchers: SlotMatchers, known: Tokenizer, num_ahead: int
) -> None:
    first, *ids = known.encode("he said").ids
    matchers.reset(place(0, choice(*WORDS), (7, first), 1))
    before = allowed(filled(matchers, [0]), 0)
    for num, token in enumerate(ids[:num_ahead]):
        matchers.expect([(0, 2 + num, token)])
    matchers.note(0, 2, [first])
    assert allowed(filled(matchers, [0]), 0) == before
    matchers.note(0, 3, [first, ids[0]])
    again = allowed(filled(matchers, [0]), 0)
    matchers.reset(place(0, choice(*WORDS), (7, first, ids[0]), 1))
    assert again == allowed(filled(matchers, [0]), 0) != before


def test_a_slot_taken_again_has_no_mask_of_its_last_tokens(matchers: SlotMatchers, known: Tokenizer) -> None:
    token = known.encode("hello").ids[0]
    matchers.reset(place(0, choice(*WORDS)))
    matchers.expect([(0, 0, token)])
    matchers.reset(place(0, choice("aa")))
    assert allowed(filled(matchers, [0]), 0) == may_follow(known, "", ("aa",))
    matchers.expect([(0, 3, token)])  # not the position where the slot is
    assert allowed(filled(matchers, [0]), 0) == may_follow(known, "", ("aa",))


def test_what_leaves_its_grammar_early_is_lost_alone(matchers: SlotMatchers, known: Tokenizer) -> None:
    token = known.encode("hello").ids[0]
    for slot in (0, 1):
        matchers.reset(place(slot, choice(*WORDS)))
    wrong = min(set(range(3, VOCAB)) - allowed(filled(matchers, [0]), 0))
    matchers.expect([(0, 0, wrong), (1, 0, token)])
    masks = filled(matchers, [0, 1])
    assert masks is not None and masks.lost == {0} and masks.rows.tolist() == [1]


def test_rows_behind_drafts_are_those_of_the_longer_output(matchers: SlotMatchers, known: Tokenizer) -> None:
    ids = known.encode("he said").ids
    assert len(ids) > 2
    for slot in (0, 2, 3):
        matchers.reset(place(slot, choice(*WORDS)))
    slots = [0, *[2] * (len(ids) + 1), 1, 3]
    masks = filled(matchers, slots, {1 + num: ids[:num] for num in range(1, len(ids) + 1)})
    assert masks is not None and masks.rows.tolist() == [row for row in range(len(slots)) if slots[row] != 1]
    for num in range(len(ids) + 1):
        matchers.reset(place(1, choice(*WORDS), tuple(ids[:num])))
        assert allowed(masks, 1 + num) == allowed(filled(matchers, [1]), 0)
    assert masks.ends == {1 + len(ids)}
    start = allowed(filled(matchers, [2]), 0)  # which is where it was
    assert allowed(masks, 0) == allowed(masks, 1) == allowed(masks, len(slots) - 1) == start


def test_behind_a_draft_that_is_not_allowed_rows_are_not_broken(matchers: SlotMatchers) -> None:
    matchers.reset(place(0, choice(*WORDS)))
    wrong = min(set(range(3, VOCAB)) - allowed(filled(matchers, [0]), 0))
    masks = filled(matchers, [0, 0, 0], {1: [wrong], 2: [wrong, wrong]})
    assert masks is not None and not masks.lost and masks.rows.tolist() == [0, 1, 2]
    assert allowed(masks, 2) >= set(range(VOCAB)) and wrong not in allowed(masks, 0)
    assert not filled(matchers, [0]).lost  # type: ignore[union-attr] # it follows one


def test_a_reused_slot_has_no_old_state(matchers: SlotMatchers) -> None:
    matchers.reset(place(0, choice("aa")))
    matchers.reset(place(1, choice("bb")))
    assert matchers.listens(0) and filled(matchers, [0, 1]) is not None
    matchers.reset(place(0, ""))
    masks = filled(matchers, [0, 1])
    assert masks is not None and masks.rows.tolist() == [1]
    matchers.reset(place(1, ""))
    assert not matchers.listens(1) and filled(matchers, [0, 1]) is None


def test_what_leaves_its_grammar_is_lost_alone(matchers: SlotMatchers) -> None:
    for slot, tokens in enumerate([(), (300, 301), ()]):
        matchers.reset(place(slot, choice(*WORDS), tokens, 0))
    masks = filled(matchers, [2, 1, 0])
    assert masks is not None and masks.lost == {1} and masks.rows.tolist() == [0, 2]


def test_a_grammar_that_cannot_be_had_is_lost_and_says_so(matchers: SlotMatchers, grammars: Grammars) -> None:
    matchers.reset(place(0, "start: nowhere"))
    masks = filled(matchers, [0])
    assert masks is not None and masks.lost == {0} and not len(masks.rows)
    with pytest.raises(ServiceError) as caught:
        grammars.compile("start: nowhere")
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "constraint")


def test_an_endless_search_is_lost_at_its_limit(matchers: SlotMatchers, known: Tokenizer) -> None:
    """A grammar whose number of parses doubles with every token."""
    (token,) = known.encode("a").ids
    matchers.reset(place(0, 'start: s\ns: s s s | s s | "a" | "aa" | "aaa" | "b"'))
    lost = 0
    for position in range(330):
        masks = filled(matchers, [0])
        assert masks is not None
        lost += bool(masks.lost)
        matchers.note(0, position + 1, [token])
    assert 1 < lost < 329


def test_compiled_grammars_are_kept_within_bytes(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [choice(word * 30) for word in WORDS]
    monkeypatch.setattr(grammars_module, "MAX_KEPT_BYTES", 1)
    monkeypatch.setattr(grammars_module, "NUM_KEPT", 2)
    held = grammars.compile(sources[0])
    for source in sources[1:]:
        grammars.compile(source)
    assert grammars.compiled(sources[1]) is None and grammars.compiled(sources[3]) is not None
    assert grammars.compiled(sources[0]) is held  # by the test


def test_a_tokenizer_of_another_kind_has_no_grammars(tmp_path: Path) -> None:
    unigram(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json", 200, (1,)) is None
    assert load_tokenizer(tmp_path / "nowhere.json", 200, (1,)) is None
    with pytest.raises(ServiceError) as caught:
        Grammars(None).compile(choice("a"))
    assert caught.value.code is Code.FAILED_PRECONDITION
