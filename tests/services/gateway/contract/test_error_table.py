"""Every error condition has its code, its reason and its details; the usage so far comes with the end of a stream."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import types_pb2

from sluice_server.engine import errors
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.scheduler.resizing import still_needed
from sluice_server.services.gateway.access import identity
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.contract.errors import draining, duplicate, loading, not_found, slow_consumer
from sluice_server.services.gateway.contract.status import to_rpc
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.process.operations import is_running
from tests.services.gateway.fake_ring import public, running, stream_request, text_of
from tests.services.gateway.requests.test_history import texts


def _over_quota() -> ServiceError:
    quotas = Quotas(lambda tenant: TenantLimits(requests_per_minute=1), 1)
    quotas.take("acme", 1, 0.0)
    with pytest.raises(ServiceError) as caught:
        quotas.take("acme", 1, 0.0)
    return caught.value


def _evicted() -> ServiceError:
    history = History(max_deltas=1, max_bytes=1)
    for seq in (1, 2, 3):
        history.add(seq, texts("x"))
    with pytest.raises(ServiceError) as caught:
        history.since(0)
    return caught.value


BAD, RETRY, RESOURCE, QUOTA = (
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
    error_details_pb2.ResourceInfo,
    error_details_pb2.QuotaFailure,
)
ROWS = [  # error, code, reason, kinds of details besides ErrorInfo, keys of its metadata
    (errors.invalid("top_p", "2", limit=1), 3, "INVALID_PARAMETER", {BAD}, {"limit"}),
    (errors.context_exceeded(9, 8, "m"), 3, "CONTEXT_LENGTH_EXCEEDED", {BAD}, {"limit", "actual"}),
    (errors.never_fits(9, 8), 9, "KV_CAPACITY", set(), {"limit", "actual"}),
    (errors.unsupported("x"), 12, "FEATURE_UNSUPPORTED", set(), {"feature"}),
    (not_found("model", "m", "h"), 5, "MODEL_NOT_FOUND", {RESOURCE}, {"name"}),
    (not_found("generation", "g", "h"), 5, "GENERATION_NOT_FOUND", {RESOURCE}, {"name"}),
    (duplicate("g"), 6, "DUPLICATE_REQUEST", set(), {"generation_id"}),
    (still_needed("r", 9, 8), 9, "CACHE_IN_USE", set(), {"limit", "actual"}),
    (is_running("e0", "Profile"), 8, "OPERATION_RUNNING", {RETRY}, {"limit"}),
    (errors.memory_pressure(), 8, "MEMORY_PRESSURE", {RETRY}, set()),
    (errors.queue_full(9, 8), 8, "QUEUE_FULL", {RETRY}, {"queue_depth", "limit"}),
    (_over_quota(), 8, "QUOTA_EXCEEDED", {RETRY, QUOTA}, {"quota", "limit", "tenant"}),
    (errors.deadline_unattainable(2.0, 1.0), 8, "DEADLINE_UNATTAINABLE", {RETRY}, {"actual", "limit"}),
    (errors.deadline_exceeded(), 4, "DEADLINE_EXCEEDED", set(), set()),
    (errors.cancelled(), 1, "CLIENT_CANCELLED", set(), set()),
    (slow_consumer(7), 10, "SLOW_CONSUMER", set(), {"last_seq"}),
    (errors.stage_lost("engine"), 14, "STAGE_LOST", {RETRY}, {"role"}),
    (loading(), 14, "MODEL_LOADING", {RETRY}, set()),
    (draining(), 14, "DRAINING", {RETRY}, set()),
    (_evicted(), 11, "RESUME_WINDOW_EXPIRED", set(), {"oldest_seq"}),
    (identity.unauthenticated("m"), 16, "CREDENTIALS_INVALID", set(), set()),
    (identity.not_allowed("Drain", [identity.Scope.ADMIN]), 7, "NOT_ALLOWED", set(), set()),
    (errors.processor_failed("a", "raised"), 13, "LOGITS_PROCESSOR_FAILED", set(), {"processor"}),
    (errors.strategy_failed("a", "raised"), 13, "SAMPLING_STRATEGY_FAILED", set(), {"strategy"}),
    (errors.engine_fault(), 13, "ENGINE_FAULT", set(), set()),
]


@pytest.mark.parametrize("row", ROWS, ids=[row[2] for row in ROWS])
def test_the_table(row: tuple[ServiceError, int, str, set[type], set[str]]) -> None:
    error, code, reason, kinds, keys = row
    status = to_rpc(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, info.reason, info.domain) == (code, reason, "sluice")
    assert status.message and keys <= info.metadata.keys()
    found = {kind for kind in (BAD, RETRY, RESOURCE, QUOTA) for one in status.details if one.Is(kind.DESCRIPTOR)}
    assert found == kinds
    delay = error_details_pb2.RetryInfo()
    assert all(delay.retry_delay.ToNanoseconds() > 0 for one in status.details if one.Unpack(delay))


async def test_what_was_used_comes_with_the_end() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        events = aiter(call)
        for _ in range(2):
            await anext(events)
        rig.lane.manager.cancel(submit.envelope.request_id, submit.envelope.tenant)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(events)
        status = rpc_status.from_call(caught.value)
        usage, info = types_pb2.Usage(), error_details_pb2.ErrorInfo()
        assert status is not None and status.details[0].Unpack(info) and status.details[-1].Unpack(usage)
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 1)
        assert dict(info.metadata) == {"generation_id": public(submit), "last_seq": "1"}
