"""Masks of grammars: exactly the ids that may follow, row by row, behind drafts too; slots forget whoever had them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from engine.errors import Code, ServiceError
from engine.plan import Placement
from engine.request import SamplingParams
from engine.sampling import filling
from engine.sampling import grammars as grammars_module
from engine.sampling.grammars import Grammars, load_tokenizer
from engine.sampling.matchers import Follower, SlotMatchers
from engine.sampling.rows import Bits, Masks
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


def allowed(masks: Masks | None, row: int) -> set[int]:
    assert masks is not None
    words = masks.bits[masks.rows.tolist().index(row)].tolist()
    return {at * 32 + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def filled(matchers: SlotMatchers, slots: list[int], ahead: dict[int, list[int]] | None = None) -> Masks | None:
    return matchers.start(slots, ahead or {}).result()


def may_follow(tokenizer: Tokenizer, written: str, words: tuple[str, ...]) -> set[int]:
    """By trying every id."""
    found = {EOS} if written in words else set()
    for token in range(tokenizer.get_vocab_size()):
        piece = tokenizer.decode([token], skip_special_tokens=False)
        if token > 2 and piece and any(word.startswith(written + piece) for word in words):
            found.add(token)
    return found


def test_masks_hold_what_may_follow_and_nothing_else(matchers: SlotMatchers, known: Tokenizer) -> None:
    """Where the text is certain, the ids are those that the tokenizer writes it with."""
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


def test_a_slot_forgets_whoever_had_it(matchers: SlotMatchers) -> None:
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
    """Every token has ever more meanings."""
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
    monkeypatch.setattr(grammars_module, "MAX_KEPT_BYTES", len(sources[0]) + len(sources[1]))
    held = grammars.compile(sources[0])
    for source in sources:
        grammars.compile(source)
    assert grammars.compiled(sources[0]) is held  # by somebody
    assert grammars.compiled(sources[1]) is None and grammars.compiled(sources[3]) is not None


def test_a_tokenizer_of_another_kind_has_no_grammars(tmp_path: Path) -> None:
    unigram(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json", 200, (1,)) is None
    assert load_tokenizer(tmp_path / "nowhere.json", 200, (1,)) is None
    with pytest.raises(ServiceError) as caught:
        Grammars(None).compile(choice("a"))
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_masks_begun_ahead_are_those_of_what_was_sampled(matchers: SlotMatchers, known: Tokenizer) -> None:
    ids = known.encode("he said").ids
    for slot in (0, 1):
        matchers.reset(place(slot, choice(*WORDS), (7,), 1))
    for num, token in enumerate(ids, 1):
        matchers.note(0, num, ids[num - 2 : num - 1] or [7])
        filled(matchers, [0])
        matchers.go_on([0, 5], [token, 9])
        matchers.note(0, 1 + num, [token])
        matchers.reset(place(2, choice(*WORDS), (7, *ids[:num]), 1))
        assert allowed(filled(matchers, [0]), 0) == allowed(filled(matchers, [2]), 0)
    assert allowed(filled(matchers, [0]), 0) == {EOS}


def test_masks_begun_ahead_are_filled_once(
    matchers: SlotMatchers, known: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same rows as they are, for others one by one; those that have gone on since are filled anew."""
    fills: list[int] = []
    real = fill_next_token_bitmask_par

    def counted(threads: LLExecutor, wants: list[tuple[LLMatcher, int]], bits: Bits) -> None:
        fills.append(len(wants))
        real(threads, wants, bits)

    monkeypatch.setattr(filling, "fill_next_token_bitmask_par", counted)
    (first, second, *_) = known.encode("he said").ids
    for slot in range(3):
        matchers.reset(place(slot, choice(*WORDS)))
    before = allowed(filled(matchers, [0, 1, 2]), 0)
    matchers.go_on([0, 1, 2], [first] * 3)
    for slot in range(3):
        matchers.note(slot, 1, [first])
    masks = filled(matchers, [0, 1, 2])
    assert fills == [3, 3] and allowed(masks, 0) == allowed(masks, 2) != before
    others = filled(matchers, [9, 2, 8, 0])
    assert allowed(others, 1) == allowed(others, 3) == allowed(masks, 0)
    assert fills == [3, 3]
    matchers.note(1, 2, [first, second])
    again = filled(matchers, [0, 1, 2])
    assert fills == [3, 3, 1] and allowed(again, 0) == allowed(masks, 0) and allowed(again, 1) != allowed(masks, 1)


def test_what_was_sampled_and_never_told_has_not_happened(matchers: SlotMatchers, known: Tokenizer) -> None:
    """The step is computed again at the same position, or the output goes on otherwise."""
    ids, others = known.encode("he said").ids, known.encode("world").ids
    matchers.reset(place(0, choice(*WORDS), (7,), 1))
    start = allowed(filled(matchers, [0]), 0)
    for _ in range(2):
        matchers.go_on([0], [ids[0]])
        matchers.note(0, 1, [7])
        assert allowed(filled(matchers, [0]), 0) == start
    matchers.go_on([0], [ids[0]])
    matchers.note(0, 2, [others[0]])
    matchers.reset(place(1, choice(*WORDS), (7, others[0]), 1))
    masks = filled(matchers, [0, 1])
    assert masks is not None and not masks.lost and allowed(masks, 0) == allowed(masks, 1)


def test_drafts_follow_what_was_sampled_ahead(matchers: SlotMatchers, known: Tokenizer) -> None:
    ids = known.encode("he said").ids
    matchers.reset(place(0, choice(*WORDS)))
    matchers.reset(place(1, choice(*WORDS)))
    filled(matchers, [0, 1])
    matchers.go_on([0, 1], [ids[0], ids[0]])
    for slot in (0, 1):
        matchers.note(slot, 1, ids[:1])
    masks = filled(matchers, [1, 0, 0], {2: ids[1:2]})
    matchers.reset(place(2, choice(*WORDS), tuple(ids[:2])))
    assert allowed(masks, 0) == allowed(masks, 1) and allowed(masks, 2) == allowed(filled(matchers, [2]), 0)


class SlowFill:
    """Fills that end only when somebody has touched their matchers, or long enough after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_busy = False
        self.begun, self.touched = threading.Event(), threading.Event()
        self._real = fill_next_token_bitmask_par
        monkeypatch.setattr(filling, "fill_next_token_bitmask_par", self.fill)
        monkeypatch.setattr(Follower, "append", self._seen(Follower.append))
        monkeypatch.setattr(Follower, "retract", self._seen(Follower.retract))

    def fill(self, threads: LLExecutor, wants: list[tuple[LLMatcher, int]], bits: Bits) -> None:
        self.is_busy = True
        self.begun.set()
        self.touched.wait(0.2)
        self._real(threads, wants, bits)
        self.is_busy = False

    def _seen(self, real: Callable[..., None]) -> Callable[..., None]:
        def seen(*args: object) -> None:
            if self.is_busy:
                self.touched.set()
            real(*args)

        return seen


@pytest.mark.parametrize("told", [[5], [], [7, 8]], ids=["another token", "the step once more", "more tokens"])
def test_nobody_touches_a_matcher_whose_mask_is_being_filled(
    matchers: SlotMatchers, known: Tokenizer, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    (token, *_) = known.encode("he said").ids
    matchers.reset(place(0, choice(*WORDS), (9,), 1))
    matchers.reset(place(1, choice(*WORDS), (9,), 1))
    slow = SlowFill(monkeypatch)
    matchers.go_on([0, 1], [token, token])
    assert slow.begun.wait(10)
    tokens = [token, *told[1:]] if len(told) > 1 else told
    matchers.note(0, 1 + len(tokens), [9, *tokens])
    assert not slow.touched.is_set()


def test_a_slot_is_taken_while_its_mask_is_being_filled(
    matchers: SlotMatchers, known: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted, cancelled or ended: nobody waits, and nothing of it is left."""
    (token, *_) = known.encode("he said").ids
    for slot in (0, 1):
        matchers.reset(place(slot, choice(*WORDS), (9,), 1))
    slow = SlowFill(monkeypatch)
    matchers.go_on([0, 1], [token, token])
    assert slow.begun.wait(10)
    matchers.reset(place(0, choice("aa")))
    matchers.reset(place(1, ""))
    masks = filled(matchers, [0, 1])
    assert masks is not None and masks.rows.tolist() == [0]
    assert allowed(masks, 0) == may_follow(known, "", ("aa",))


@pytest.mark.parametrize("is_over", [True, False], ids=["it is over", "it is still being filled"])
def test_what_goes_wrong_ahead_is_done_again_when_it_is_asked_for(
    matchers: SlotMatchers, known: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    (token, *_) = known.encode("he said").ids
    matchers.reset(place(0, choice(*WORDS)))
    matchers.reset(place(1, choice(*WORDS), (token,)))
    failures, asked = [MemoryError("once")], threading.Event()

    def failing(threads: LLExecutor, wants: list[tuple[LLMatcher, int]], bits: Bits) -> None:
        if failures:
            assert asked.wait(10)
            raise failures.pop()
        fill_next_token_bitmask_par(threads, wants, bits)

    monkeypatch.setattr(filling, "fill_next_token_bitmask_par", failing)
    matchers.go_on([0], [token])
    matchers.note(0, 1, [token])
    if is_over:
        asked.set()
        matchers._settle()
        alone = filled(matchers, [0])
        assert allowed(alone, 0) == allowed(filled(matchers, [1]), 0)
    else:
        filling_both = matchers.start([0, 1], {})
        asked.set()
        both = filling_both.result()
        assert allowed(both, 0) == allowed(both, 1)
