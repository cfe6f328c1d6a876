"""`LLM` on the embedded model: batches, streams, errors before any work, ^C, and release of everything at the end."""

import io
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice_server.engine.engine import Engine, StepEvents
from sluice_server.engine.errors import ServiceError, engine_fault
from sluice_server.services.offline import LLM, PromptError, SamplingParams
from sluice_server.services.offline.pipeline import Pipeline

PROMPTS = ["def mean(values):", "import os", "class Stack:", "# reads a file\n"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, max_num_seqs=8) as made:
        yield made


def pipeline_of(llm: LLM) -> Pipeline:
    return llm._open()


def engine_of(llm: LLM) -> Engine:
    return pipeline_of(llm).engine


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:  # noqa: ANN401 # as `generate` takes them
    return [one.outputs[0].text for one in llm.generate(prompts, params)]


def is_idle(llm: LLM) -> bool:
    """Whether nothing of any request is left."""
    scheduler = engine_of(llm).scheduler
    pool = scheduler.cache.pool
    left = scheduler.num_waiting + scheduler.num_running + pipeline_of(llm).num_open
    return not left and pool.num_free == pool.num_blocks


def test_a_batch_is_answered_in_its_order(llm: LLM) -> None:
    alone = [texts(llm, prompt, GREEDY)[0] for prompt in PROMPTS]
    lengths = [{"max_tokens": num, "temperature": 0.0, "ignore_eos": True} for num in (12, 3, 9, 5)]
    found = llm.generate(PROMPTS, lengths)
    assert [one.prompt for one in found] == PROMPTS
    assert [len(one.outputs[0].token_ids) for one in found] == [12, 3, 9, 5]
    assert all(whole.startswith(one.outputs[0].text) for whole, one in zip(alone, found, strict=True))
    assert texts(llm, PROMPTS * 5, GREEDY) == alone * 5  # more than run at once
    assert is_idle(llm)


def test_texts_and_ids_and_lists_of_them(llm: LLM) -> None:
    (by_text,) = llm.generate(PROMPTS[0], GREEDY)
    ids = llm.tokenize(PROMPTS[0])
    assert by_text.prompt_token_ids == ids and llm.detokenize(ids) == PROMPTS[0]
    (by_ids,) = llm.generate(ids, GREEDY)
    assert by_ids.prompt is None and by_ids.outputs == by_text.outputs
    mixed: list[str | list[int]] = [ids, PROMPTS[0]]
    both = llm.generate(mixed, GREEDY)
    assert [one.outputs for one in both] == [by_text.outputs] * 2
    assert llm.generate([], GREEDY) == []
    assert by_text.outputs[0].text == llm.detokenize(by_text.outputs[0].token_ids)


def test_the_seed_that_was_drawn_gives_the_same_again(llm: LLM) -> None:
    (drawn,) = llm.generate(PROMPTS[0], {"max_tokens": 12, "temperature": 1.0})
    (again,) = llm.generate(PROMPTS[0], {"max_tokens": 12, "temperature": 1.0, "seed": drawn.seed})
    assert again.outputs == drawn.outputs


def test_a_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=3, stop="zzz")
    pieces = list(llm.stream(PROMPTS[0], params))
    assert len(pieces) > 5 and "".join(pieces) == texts(llm, PROMPTS[0], params)[0]


def test_a_stream_and_a_batch_run_together(llm: LLM) -> None:
    whole = texts(llm, PROMPTS[0], GREEDY)[0]
    running = llm.stream(PROMPTS[0], GREEDY)
    first = next(running)
    assert texts(llm, PROMPTS[1], LONG) == texts(llm, PROMPTS[1], LONG)  # in whose steps the stream ends
    assert first + "".join(running) == whole


def test_a_stream_that_is_left_is_cancelled(llm: LLM) -> None:
    running = llm.stream(PROMPTS[0], LONG)
    next(running)
    assert not is_idle(llm)
    running.close()  # type: ignore[attr-defined] # it is a generator
    assert is_idle(llm)


WRONG: list[tuple[Callable[[LLM], object], int, str, str]] = [
    (lambda llm: llm.generate(["a", "b " * 4000], {"max_tokens": 4}), 1, "prompt", "2048"),
    (lambda llm: llm.generate(["a", "b"], [GREEDY, {"temperature": 101}]), 1, "temperature", "100.0"),
    (lambda llm: llm.generate([[1], [2, 5000]], GREEDY), 1, "prompt.token_ids[1]", "4096"),
    (lambda llm: llm.generate(["a", ""], GREEDY), 1, "prompt", ""),
    (lambda llm: llm.generate(["a", 3], GREEDY), 1, "prompt", ""),  # type: ignore[arg-type] # as callers without types may
    (lambda llm: llm.generate(["a", "\ud800"], GREEDY), 1, "prompt", ""),
    (lambda llm: llm.generate(["a", "b"], [GREEDY, {"regex": "("}]), 1, "constraint.regex", ""),
    (
        lambda llm: llm.generate(["a", "b"], [GREEDY, {"n": 9, "temperature": 1.0}]),
        1,
        "",
        "8",
    ),  # --max-num-seqs is no field
    (lambda llm: llm.generate(["a"], {"credit_window": 9}), -1, "", ""),
    (lambda llm: llm.chat([[{"role": "user", "content": "a"}], [{"role": "x"}]], GREEDY), 1, "messages[0].role", ""),
    (lambda llm: list(llm.stream("a", {"n": 2, "temperature": 1.0})), 0, "n", "1"),
    (lambda llm: list(llm.stream("a", {"max_tokens": 0})), 0, "max_tokens", "1"),
]


@pytest.mark.parametrize(("call", "index", "field", "limit"), WRONG)
def test_an_error_names_prompt_field_and_limit_before_any_step(
    llm: LLM, call: Callable[[LLM], object], index: int, field: str, limit: str
) -> None:
    num_tokens = engine_of(llm).stats.num_tokens
    if index < 0:
        with pytest.raises(TypeError, match="is no parameter of a generation"):
            call(llm)
    else:
        with pytest.raises(PromptError, match=rf"^prompts\[{index}\]: ") as caught:
            call(llm)
        assert (caught.value.index, caught.value.field, caught.value.limit) == (index, field, limit)
    assert engine_of(llm).stats.num_tokens == num_tokens and is_idle(llm)


def test_parameters_must_be_one_or_as_many(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 parameters for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])


def test_an_error_of_one_prompt_while_it_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error ends the batch, and names the prompt."""
    engine = engine_of(llm)
    real, steps = engine.step, iter(range(100))

    def step() -> StepEvents:
        events = real()
        if next(steps) == 3:
            name = next(iter(engine.scheduler._state.groups))
            engine.cancel(name)
            events.sampled[:] = [one for one in events.sampled if one.request_id != name]
            events.failed.append((name, engine_fault("a row of no numbers")))
        return events

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(PromptError, match=r"^prompts\[0\]: the engine failed while computing") as caught:
        llm.generate(PROMPTS, LONG)
    assert caught.value.index == 0
    monkeypatch.undo()
    assert is_idle(llm) and len(llm.generate(PROMPTS, GREEDY)) == 4


def test_an_interrupt_releases_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts(llm, PROMPTS, GREEDY)
    engine = engine_of(llm)
    real = engine.step
    whole: list[int] = []

    def step() -> StepEvents:
        if len(whole) == 3:
            signal.raise_signal(signal.SIGINT)
        events = real()
        whole.append(1)
        return events

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG)
    assert len(whole) == 4, "the step in which it came ended, and no other began"
    assert is_idle(llm)
    monkeypatch.undo()
    assert texts(llm, PROMPTS, GREEDY) == want


def test_an_interrupt_while_a_constraint_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pipeline_of(llm)._calls

    class Interrupted:
        def get(self) -> Callable[[], None]:
            calls.get()
            raise KeyboardInterrupt

    monkeypatch.setattr(pipeline_of(llm), "_calls", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", {"regex": "ab{7}", "max_tokens": 20})
    monkeypatch.undo()
    assert is_idle(llm)
    assert texts(llm, "a", {"regex": "ab{7}", "max_tokens": 20}) == ["abbbbbbb"]


def test_the_bar_is_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", quiet := Terminal())
    llm.generate(PROMPTS, GREEDY, progress=False)
    assert quiet.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    llm.generate(PROMPTS, GREEDY)
    assert "4/4" in shown.getvalue() and "48 tokens" in shown.getvalue()


def test_the_end_gives_everything_back() -> None:
    threads, children = set(threading.enumerate()), psutil.Process().children()
    llm = LLM("demo", threads=1)
    llm.chat([{"role": "user", "content": "a"}], {"regex": "ab", "max_tokens": 8})  # renders, compiles, fills masks
    assert len(psutil.Process().children()) > len(children)
    weights = weakref.ref(engine_of(llm).runner)
    running = llm.stream("a", LONG)
    next(running)
    llm.close()
    llm.close()
    with pytest.raises(ServiceError, match="closed"):
        next(running)
    del running
    assert weights() is None
    assert psutil.Process().children() == children
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    with pytest.raises(ServiceError, match="this LLM is closed: make a new one"):
        llm.generate("a")


def test_options_reach_the_engine(llm: LLM, tmp_path: Path) -> None:
    """Drafts and a disk cache change no token, and leave no thread behind."""
    threads = set(threading.enumerate())
    cache = {"host_cache_bytes": 1 << 22, "disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 22}
    with LLM("demo", threads=1, speculation="draft", draft_model="demo", draft_length="fixed", **cache) as other:
        assert texts(other, PROMPTS, LONG) == texts(llm, PROMPTS, LONG)
        assert engine_of(other).scheduler.draft_stats.num_accepted > 0
        assert any(thread.name == "cache disk" for thread in threading.enumerate())
        sparing = {"max_tokens": 8, "temperature": 0.0, "speculate": False}
        assert other.generate(PROMPTS[0], sparing)[0].outputs[0].text
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.name == "cache disk"]


def test_what_breaks_a_step_off_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> StepEvents:
        raise RuntimeError("a fault of ours")

    with LLM("demo", threads=1) as llm:
        monkeypatch.setattr(engine_of(llm), "step", step)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            llm.generate(PROMPTS, GREEDY)
        monkeypatch.undo()
        with pytest.raises(ServiceError, match="broken off in the middle of a step"):
            llm.generate(PROMPTS, GREEDY)
