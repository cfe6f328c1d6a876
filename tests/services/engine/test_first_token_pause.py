"""An engine waits a moment behind the first token of a request alone, and never beside others."""

import pytest

from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.worker.host.cores import Cores
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.services.engine import process
from sluice_server.services.engine.first_token_pause import PAUSE_S, FirstTokenPause, pause_of
from sluice_server.services.messages.messages import Envelope, Prompt, Tokens
from sluice_server.services.messages.work import Scheduling, Stops, pack_ids
from tests.services.engine.test_engine_stage import make


def asked(name: str, max_tokens: int) -> Prompt:
    """A request for so many tokens."""
    options = SamplingParams(max_tokens=max_tokens)
    return Prompt(Envelope(name, "g"), pack_ids([5, 6, 7]), options, Stops(), Scheduling(), 0.0)


def paused(*rounds: list[Prompt]) -> list[tuple[float, int]]:
    """The pauses of a stage, each with the number of tokens sent before. Each round of requests comes before a turn."""
    stage, sent = make()
    found: list[tuple[float, int]] = []
    stage.pause = FirstTokenPause(
        0.25, lambda seconds: found.append((seconds, sum(isinstance(one, Tokens) for one in sent)))
    )
    for prompts in rounds:
        for one in prompts:
            stage.handle(one)
        stage.turn()
    while stage.num_open:
        stage.turn()
    return found


def test_a_request_alone_is_followed_by_one_pause_behind_its_first_token() -> None:
    assert paused([asked("a", 4)]) == [(0.25, 1)]


def test_each_request_that_is_alone_has_its_pause() -> None:
    assert paused([asked("a", 2)], [], [asked("b", 2)]) == [(0.25, 1), (0.25, 3)]


def test_no_other_request_waits_for_a_pause() -> None:
    """Neither one that runs, nor one that came meanwhile, nor the one after a request of a single token."""
    assert paused([asked("a", 4), asked("b", 4)]) == []
    assert paused([asked("a", 4)], [asked("b", 4)]) == []
    assert paused([asked("a", 1)], [asked("b", 1)]) == []


@pytest.mark.parametrize(("threads", "num_cores", "seconds"), [(2, 2, PAUSE_S), (1, 2, 0.0), (0, 2, 0.0)])
def test_engines_that_leave_a_core_to_others_do_not_pause(threads: int, num_cores: int, seconds: float) -> None:
    """One on a GPU has no threads that compute."""
    slept: list[float] = []
    pause = pause_of(Computing(threads=threads), num_cores)
    pause._sleep = slept.append
    pause.note("a")
    pause.before_step(["a"])
    assert slept == ([seconds] if seconds else [])


def test_an_engine_process_pauses_as_long_as_its_threads_fill_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number may change while it is idle."""
    monkeypatch.setattr(process, "find_cores", lambda: Cores(2, None))
    stage = make()[0]
    stage.reports.computing = Computing(threads=2)
    tuner = ThreadTuner(int, int, (2, 1), "", float)
    process.follow_threads(stage, tuner)
    assert stage.pause._seconds == PAUSE_S
    tuner.on_change(1, "measured")
    assert stage.pause._seconds == 0.0 and stage.reports.computing.threads == 1
