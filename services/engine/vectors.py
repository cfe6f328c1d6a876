"""Requests for vectors: each input is a request of the engine, and the vectors leave together as one Result.

All inputs are checked before the first is added. Few inputs of a request are in the engine at a time, so that its queue
stays short for others; the next one is added when one has ended.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch

from sluice_server.engine.engine import Engine, StepEvents
from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.scheduler.events import Pooled
from sluice_server.services.engine.failures import told_to_client
from sluice_server.services.messages.details import Embedded, Timings
from sluice_server.services.messages.messages import Cancel, Envelope, Inputs, Message, Result, failed
from sluice_server.services.messages.work import VectorEncoding, VectorOptions, unpack_ids
from sluice_server.services.ring.leases import Leases

PROMPT = "prompt"  # the field of the engine's errors
SEPARATOR = "."  # in the id of an engine's request, between the request here and the input's index
MOST_IN_ENGINE = 64  # inputs of one request at a time
TINY = 1e-12  # a shorter vector is not scaled up to length 1

Emit = Callable[[Message], None]
Count = Callable[[str, str], None]


@dataclasses.dataclass(slots=True)
class _OpenInputs:
    """A request with inputs that have no vector yet."""

    inputs: Inputs
    arrival_s: float
    num_added: int = 0
    in_engine: set[str] = dataclasses.field(default_factory=set)  # ids of the engine's requests
    found: dict[int, Pooled] = dataclasses.field(default_factory=dict)  # by input


class VectorRequests:
    """The open requests for vectors of one engine."""

    def __init__(self, engine: Engine, leases: Leases, clock: Callable[[], float], emit: Emit, count: Count) -> None:
        """`count` takes how a request ended, and the reason of its error."""
        self._engine = engine
        self._leases = leases
        self._clock = clock
        self._emit = emit
        self._count = count
        self._open: dict[str, _OpenInputs] = {}
        self._owners: dict[str, tuple[str, int]] = {}  # by the engine's request: the request here, and its input

    def __len__(self) -> int:
        return len(self._open)

    def add(self, inputs: Inputs) -> None:
        """Opens a request, or fails it: naming the input that can never be computed, or for want of room."""
        envelope = inputs.envelope
        self._leases.seen(envelope.origin, envelope.epoch)
        earlier = self._open.get(envelope.request_id)
        if earlier is not None and envelope.attempt <= earlier.inputs.envelope.attempt:
            self._count("stale", "")
            return
        if earlier is not None:
            self._drop(earlier)
        one = _OpenInputs(inputs, self._clock())
        try:
            if len(inputs.num_first) not in (0, len(inputs.ids)):
                raise invalid(inputs.field, f"have {len(inputs.num_first)} first texts for {len(inputs.ids)} inputs")
            for at in range(len(inputs.ids)):
                self._check(one, at)
        except ServiceError as error:
            self._end(one, error)
            return
        self._open[envelope.request_id] = one
        self._fill(one)

    def cancel(self, message: Cancel) -> None:
        """Drops a request. It has no outputs that could be cancelled alone."""
        one = self._open.get(message.envelope.request_id)
        if one is not None and message.output_index is None and message.envelope.attempt >= one.inputs.envelope.attempt:
            self._drop(one)

    def drop(self, has_ended: Callable[[Envelope], bool]) -> None:
        """Drops the requests that have ended elsewhere."""
        for one in list(self._open.values()):
            if has_ended(one.inputs.envelope):
                self._drop(one)

    def take(self, events: StepEvents) -> list[tuple[str, ServiceError]]:
        """Takes the vectors and failures of a step; returns the failures that are not of requests here."""
        others = []
        for engine_id, error in events.failed:
            if engine_id in self._owners:
                request_id, at = self._owners[engine_id]
                self._end(self._open[request_id], named(error, self._open[request_id].inputs, at))
            elif engine_id.partition(SEPARATOR)[1] == "":  # else a sibling failed in the same step
                others.append((engine_id, error))
        for event in events.pooled:
            if event.request_id in self._owners:
                self._note(event)
        return others

    def _note(self, event: Pooled) -> None:
        request_id, at = self._owners.pop(event.request_id)
        one = self._open[request_id]
        one.in_engine.remove(event.request_id)
        one.found[at] = event
        if len(one.found) < len(one.inputs.ids):
            self._fill(one)
            return
        del self._open[request_id]
        self._count("finished", "")
        self._emit(_result(one))

    def _drop(self, one: _OpenInputs) -> None:
        self._release(one)
        self._count("cancelled", "")

    def _end(self, one: _OpenInputs, error: ServiceError) -> None:
        """Ends a request with an error; nothing of it stays in the engine."""
        self._release(one)
        self._count("failed", error.reason)
        self._emit(failed(one.inputs.envelope, told_to_client(one.inputs.envelope, error)))

    def _release(self, one: _OpenInputs) -> None:
        self._open.pop(one.inputs.envelope.request_id, None)
        for engine_id in one.in_engine:
            self._engine.cancel(engine_id)
            del self._owners[engine_id]
        one.in_engine.clear()

    def _check(self, one: _OpenInputs, at: int) -> None:
        try:
            self._engine.scheduler.validate(self._request(one, at))
        except ServiceError as error:
            raise named(error, one.inputs, at) from None

    def _fill(self, one: _OpenInputs) -> None:
        """Adds inputs to the engine as far as its queue and `MOST_IN_ENGINE` allow; fails a request that gets none
        in."""
        while one.num_added < len(one.inputs.ids) and len(one.in_engine) < MOST_IN_ENGINE:
            request = self._request(one, one.num_added)
            try:
                self._engine.add(request)
            except ServiceError as error:
                if not one.in_engine:  # else the queue is full: tried again when one of them has ended
                    self._end(one, error)
                return
            self._owners[request.request_id] = one.inputs.envelope.request_id, one.num_added
            one.in_engine.add(request.request_id)
            one.num_added += 1

    def _request(self, one: _OpenInputs, at: int) -> EngineRequest:
        inputs, envelope = one.inputs, one.inputs.envelope
        return EngineRequest(
            request_id=f"{envelope.request_id}{SEPARATOR}{at}",
            prompt_ids=tuple(unpack_ids(inputs.ids[at])),
            params=SamplingParams(),
            priority=inputs.scheduling.priority,
            arrival_s=one.arrival_s,
            deadline_s=math.inf if envelope.time_left_s is None else one.arrival_s + envelope.time_left_s,
            cache_salt=tenant_root(self._engine.identity.encoded(), envelope.tenant),
            tenant=envelope.tenant,
            pooling=inputs.options.pooling,
            num_first=inputs.num_first[at] if inputs.num_first else None,
        )


def named(error: ServiceError, inputs: Inputs, at: int) -> ServiceError:
    """Returns an error about a prompt as one about the input of that index."""
    if not error.field.startswith(PROMPT):
        return error
    field, message = (f"{inputs.field}[{at}]{text.removeprefix(PROMPT)}" for text in (error.field, error.message))
    return ServiceError(error.code, error.reason, message, field=field, details=error.details)


def encoded(vector: bytes, options: VectorOptions) -> bytes:
    """Returns a vector of float32 cut, scaled and encoded as the options say."""
    found = np.frombuffer(vector, dtype="<f4")[: options.dimensions]
    if options.normalize:
        found = found / np.float32(max(float(np.linalg.norm(found)), TINY))
    if options.encoding is VectorEncoding.BINARY:
        return np.packbits(found > 0).tobytes()
    if options.encoding is VectorEncoding.BFLOAT16:
        return torch.from_numpy(found.astype(np.float32)).bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()
    return found.astype("<f4").tobytes()


def _result(one: _OpenInputs) -> Result:
    """Returns the answer to a request; its queueing ended when its first input was scheduled."""
    events = [one.found[at] for at in range(len(one.inputs.ids))]
    queue_s = min(event.times.queue_s for event in events)
    timings = Timings(
        tokenize_s=one.inputs.tokenize_s,
        queue_s=queue_s,
        prefill_s=max(event.times.end_s for event in events) - one.arrival_s - queue_s,
        num_preemptions=sum(event.times.num_preemptions for event in events),
    )
    vectors = tuple(encoded(event.vector, one.inputs.options) for event in events)
    num_tokens = tuple(event.num_prompt for event in events)
    value = Embedded(vectors, num_tokens, sum(event.num_cached for event in events), timings)
    return Result(one.inputs.envelope, value)
