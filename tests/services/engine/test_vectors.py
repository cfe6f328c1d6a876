"""Requests for vectors at the engine stage: one Result in order, few inputs at a time, all or nothing."""

import dataclasses
import itertools
import re
import struct

import numpy as np
import pytest
import torch

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import Limits, Pooling, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.services.engine import vectors
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.engine.vectors import encoded
from sluice_server.services.messages.details import Embedded
from sluice_server.services.messages.messages import (
    Cancel,
    Envelope,
    Failed,
    Inputs,
    Message,
    OpenSerials,
    Prompt,
    Result,
    Tokens,
)
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import Scheduling, Stops, VectorEncoding, VectorOptions, pack_ids
from tests.services.test_stage_attempts import Nines, unrecorded

LIMITS = Limits(context_length=20, vocab_size=400)
WHOLE = VectorOptions(Pooling.LAST, normalize=False, dimensions=2)


class Vectors(Nines):
    """A model whose every vector is the prompt's last id and 1; of a prompt that ends in 13 it fails."""

    def collect(self) -> StepResult:
        plan, sampled = self._plan, super().collect()
        assert plan is not None
        lasts = [plan.token_ids[end - 1] for end in itertools.accumulate(plan.query_lens)]
        ended = {i: lasts[i] for i, is_end in plan.pools.items() if is_end}
        return dataclasses.replace(
            sampled,
            failed=frozenset(i for i, last in ended.items() if last == 13),
            pooled={i: struct.pack("<2f", last, 1.0) for i, last in ended.items() if last != 13},
        )


def make(num_queued: int = 1000) -> tuple[EngineStage, list[Message]]:
    """A stage with that model, and the messages it emits apart from reports."""
    sent: list[Message] = []
    settings = SchedulerSettings(max_queued_requests=num_queued)
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40, settings)
    emit = lambda message: None if isinstance(message, Report) else sent.append(message)  # noqa: E731 # shorter so
    return EngineStage(Engine(scheduler, Vectors()), RingMembership("engine-0", 1), emit, unrecorded), sent


def inputs(*prompts: list[int], attempt: int = 0, name: str = "a") -> Inputs:
    packed = tuple(pack_ids(ids) for ids in prompts)
    return Inputs(Envelope(name, "g", attempt=attempt, serial=1), packed, WHOLE, Scheduling(), 0.25)


def run(stage: EngineStage) -> None:
    while stage.turn():
        pass


def firsts(message: Message) -> list[float]:
    assert isinstance(message, Result) and isinstance(message.value, Embedded)
    return [struct.unpack("<2f", vector)[0] for vector in message.value.vectors]


def test_vectors_leave_together_in_order_beside_generations() -> None:
    stage, sent = make()
    many = [[i % 7 + 20] * (i % 9) + [i] for i in range(100, 300)]
    stage.handle(inputs(*many))
    stage.handle(Prompt(Envelope("b", "g"), pack_ids([5, 6]), SamplingParams(max_tokens=3), Stops(), Scheduling(), 0.0))
    run(stage)
    (result,) = [one for one in sent if isinstance(one, Result)]
    assert firsts(result) == list(range(100, 300))
    assert isinstance(result.value, Embedded) and result.value.num_tokens == tuple(map(len, many))
    assert result.value.timings.tokenize_s == 0.25
    assert len([one for one in sent if isinstance(one, Tokens)]) == 3
    assert stage.num_open == 0 and stage.ended == {"finished": 2} and not stage.engine.has_work


def test_few_inputs_of_a_request_are_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "MOST_IN_ENGINE", 6)
    stage, sent = make()
    stage.handle(inputs(*([i] for i in range(30, 60))))
    assert stage.engine.scheduler.num_open == 6 and stage.num_open == 1
    most = 0
    while stage.turn():
        most = max(most, stage.engine.scheduler.num_open)
    assert most == 6 and firsts(sent[0]) == list(range(30, 60))


def test_a_full_queue_lets_in_what_fits() -> None:
    stage, sent = make(num_queued=3)
    stage.handle(inputs(*([i] for i in range(30, 60))))
    assert stage.engine.scheduler.num_open == 3
    run(stage)
    assert firsts(sent[0]) == list(range(30, 60))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([1] * 21, r"^inputs\[1\] has 21 tokens; this model allows 20"),
        ([], r"^inputs\[1\]: has no tokens"),
        ([400], r"^inputs\[1\]\[0\]: 400 is not in"),
    ],
)
def test_a_bad_input_is_named_and_nothing_is_computed(bad: list[int], told: str) -> None:
    stage, sent = make()
    stage.handle(inputs([5], bad, [6]))
    (failed,) = sent
    assert isinstance(failed, Failed) and failed.field.startswith("inputs[1]")
    assert re.match(told, failed.message)
    assert not stage.engine.has_work and stage.num_open == 0 and stage.ended == {"failed": 1}


def test_an_input_may_fill_the_context() -> None:
    stage, sent = make()
    stage.handle(inputs([8] * 20, [7]))
    run(stage)
    assert firsts(sent[0]) == [8, 7]


def test_one_that_fails_ends_the_whole_request() -> None:
    stage, sent = make()
    stage.handle(inputs(*([i] for i in (5, 6, 13, 7, 13, 8))))
    run(stage)
    (failed,) = sent
    assert isinstance(failed, Failed) and failed.reason == "ENGINE_FAULT"
    assert stage.num_open == 0 and not stage.engine.has_work and stage.engine.scheduler.num_open == 0


def test_a_cancel_drops_all_inputs_and_a_later_attempt_replaces_them() -> None:
    stage, sent = make()
    stage.handle(inputs([5], [6]))
    stage.handle(Cancel(Envelope("a", "g"), output_index=0))
    stage.handle(inputs([5], [6], attempt=0))  # a copy
    assert stage.num_open == 1 and stage.engine.scheduler.num_open == 2
    stage.handle(inputs([7], [8], attempt=1))
    assert stage.engine.scheduler.num_open == 2
    run(stage)
    results = [one for one in sent if isinstance(one, Result)]
    assert [firsts(one) for one in results] == [[7, 8]] and results[0].envelope.attempt == 1
    stage.handle(inputs([5], [6], name="c"))
    stage.handle(Cancel(Envelope("c", "g")))
    stage.handle(inputs([5], [6], name="d"))
    stage.handle(OpenSerials("g", 0, 2, frozenset()))
    assert stage.num_open == 0 and not stage.engine.has_work
    assert stage.ended == {"stale": 1, "cancelled": 3, "finished": 1}


def test_vectors_are_cut_scaled_and_encoded() -> None:
    vector = torch.tensor([3.0, -4.0, 12.0, -0.5, 7.0, 1.0, 1.0, 1.0, 2.0])
    raw = vector.numpy().tobytes()

    def made(encoding: VectorEncoding, num: int = 9, normalize: bool = False) -> bytes:
        return encoded(raw, VectorOptions(Pooling.LAST, normalize, num, encoding))

    assert made(VectorEncoding.FLOAT) == raw and made(VectorEncoding.FLOAT, 2) == raw[:8]
    scaled = np.frombuffer(made(VectorEncoding.FLOAT, 2, True), dtype=np.float32)
    assert scaled.tolist() == pytest.approx([0.6, -0.8])
    short = made(VectorEncoding.BFLOAT16, 9, True)
    want = torch.nn.functional.normalize(vector, dim=0).bfloat16()
    assert torch.equal(torch.frombuffer(bytearray(short), dtype=torch.bfloat16), want)
    assert made(VectorEncoding.BINARY) == bytes([0b10101111, 0b10000000])
    zero = encoded(bytes(8), VectorOptions(Pooling.LAST, True, 2))
    assert zero == bytes(8)
