"""The recorders of every process: stacks of threads, and Python's memory."""

import json
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.profiles import stacks
from sluice_server.services.profiles.python_memory import PythonMemory
from sluice_server.services.profiles.stacks import StackSampler


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread that waits in a function of its own."""
    done, is_there = threading.Event(), threading.Event()

    def wait_for_the_end() -> None:
        is_there.set()
        done.wait()

    thread = threading.Thread(target=wait_for_the_end, name="waiting")
    thread.start()
    is_there.wait()
    yield thread
    done.set()
    thread.join()


def test_all_threads_are_sampled_with_their_names(waiting: threading.Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "INTERVAL_S", 0.001)
    monkeypatch.setattr(stacks, "MAX_THREADS", len(threading.enumerate()))
    sampler = StackSampler("here")
    sampler.start()
    while not {threading.main_thread().ident, waiting.ident} <= set(sampler._seen):
        pass
    sampler.stop()
    sampler.stop()
    made = json.loads(sampler.encoded())
    frames = [one["name"] for one in made["shared"]["frames"]]
    profiles = {one["name"]: one for one in made["profiles"]}
    assert made["profiles"][0]["name"] == "MainThread" and "stack sampler" not in profiles
    for name, inside in (("MainThread", "test_all_threads"), ("waiting", "wait_for_the_end")):
        assert any(inside in frames[at] for sample in profiles[name]["samples"] for at in sample), name
        assert all(weight >= 0 for weight in profiles[name]["weights"])
    assert len(profiles["waiting"]["samples"]) == 1  # equal samples are one


def test_what_stays_allocated_is_shown_with_the_line_that_made_it() -> None:
    recorder = PythonMemory("here")
    recorder.start()
    kept = [bytearray(10_000) for _ in range(50)]
    recorder.stop()
    recorder.stop()
    made = json.loads(recorder.encoded())
    profile, frames = made["profiles"][0], made["shared"]["frames"]
    assert profile["unit"] == "bytes" and profile["weights"][0] >= len(kept) * 10_000
    assert frames[profile["samples"][0][-1]]["name"].startswith("test_recorders.py:")
    assert not tracemalloc.is_tracing()


def test_python_memory_that_is_recorded_already_is_left_alone() -> None:
    tracemalloc.start()
    try:
        recorder = PythonMemory("here")
        with pytest.raises(ServiceError) as caught:
            recorder.start()
        recorder.stop()
        assert caught.value.reason == "OPERATION_UNAVAILABLE" and tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
