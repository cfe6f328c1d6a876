"""Beam search without an engine: which beams continue, complete and end the search. Equality: test_engine_search."""

from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.scheduler.beam import BeamSearch

END = frozenset({0})


def found(*pairs: tuple[int, float]) -> TokenLogprob:
    """Candidates, best first."""
    return TokenLogprob(0.0, 1, tuple(token for token, _ in pairs), tuple(logprob for _, logprob in pairs))


def test_the_best_of_all_beams_go_on() -> None:
    beams = [(-1.0, found((5, -0.1), (6, -0.2), (0, -3.0))), (-1.05, found((7, -0.1), (8, -2.0), (9, -3.0)))]
    advance = BeamSearch(2, 1.0, False).advance(beams, 2, END, at_end=False)
    assert [(step.parent, step.token) for step in advance.live] == [(0, 5), (1, 7)]
    assert advance.complete == ()
    assert advance.live[0].logprob.rank == 1 and advance.live[1].logprob.logprob == -0.1


def test_only_candidates_among_the_best_complete() -> None:
    search = BeamSearch(2, 1.0, False)
    advance = search.advance([(0.0, found((5, -0.1), (6, -0.2), (0, -0.3)))], 1, END, at_end=False)
    assert advance.complete == () and len(advance.live) == 2
    advance = search.advance([(0.0, found((0, -0.1), (5, -0.2), (6, -0.3)))], 1, END, at_end=False)
    assert [(score, step.token) for score, step in advance.complete] == [(-0.1, 0)]
    assert [step.token for step in advance.live] == [5, 6]


def test_length_is_divided_out() -> None:
    advance = BeamSearch(2, 2.0, False).advance([(-4.0, found((0, -0.5), (5, -0.6)))], 3, END, at_end=False)
    assert advance.complete[0][0] == -4.5 / 9


def test_early_stopping_ends_with_enough_hypotheses_others_when_no_beam_can_win() -> None:
    first = [(0.0, found((0, -0.1), (5, -0.2), (6, -9.0)))]
    second = [(-0.2, found((0, -0.1), (5, -0.01), (6, -9.0)))]
    for early, live in ((True, 0), (False, 2)):
        search = BeamSearch(2, 0.0, early)
        search.advance(first, 1, END, at_end=False)
        assert len(search.advance(second, 2, END, at_end=False).live) == live
    search = BeamSearch(2, 0.0, False)
    search.advance(first, 1, END, at_end=False)
    assert search.advance([(-0.2, found((0, -0.1), (5, -0.5), (6, -9.0)))], 2, END, at_end=False).live == ()


def test_at_the_limit_the_best_complete_whatever_their_token() -> None:
    advance = BeamSearch(2, 1.0, False).advance([(0.0, found((5, -0.1), (0, -0.2), (6, -0.3)))], 4, END, at_end=True)
    assert [step.token for _, step in advance.complete] == [5, 0] and advance.live == ()
