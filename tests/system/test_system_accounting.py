"""After a random storm every counter, at Prometheus and over OTLP, adds up exactly to what clients saw."""

import asyncio
import contextlib
import random
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.telemetry.collector import Collector
from tests.system.roles import free_ports
from tests.system.service import Service, serve, spec, wait_until

NUM = 120
AT_ONCE = 12
ROLES = ("engine", "gateway", "tokenizer", "detokenizer")
KINDS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "completion": "completion_tokens"}

Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"  # only the stubs of types have it


class Seen:
    """What the clients received."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()  # of requests that were let in, by code
        self.refused: Counter[str] = Counter()  # by reason
        self.tokens: Counter[str] = Counter()
        self.num_with_tokens = 0
        self.num_whole = 0  # of those with tokens, what ended well: the engine finished it too

    def used(self, usage: types_pb2.Usage, well: bool = False) -> None:
        """Usage of a request that ended, well or not."""
        for kind, field in KINDS.items():
            self.tokens[kind] += getattr(usage, field)
        self.num_with_tokens += usage.completion_tokens > 0
        self.num_whole += well and usage.completion_tokens > 0


WAYS = ("well", "well", "stops", "several", "by id", "too long", "refused", "tokenize", "detokenize", "talk")


async def one(stub: Stub, way: str, rng: random.Random, seen: Seen) -> None:
    """Makes a call that ends in one of many ways."""
    if way == "tokenize":
        await unary(stub.Tokenize(inference_pb2.TokenizeRequest(text="import os")), seen)
    elif way == "detokenize":
        await unary(stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5, 6])), seen)
    elif way == "talk":
        await talk(stub, rng, seen)
    else:
        await streamed(stub, way, asked(way, rng), seen)


async def unary(call: Awaitable[object], seen: Seen) -> None:
    """Makes a call that generates nothing."""
    try:
        await call
        seen.ends["OK"] += 1
    except grpc.aio.AioRpcError as error:
        failed(error, seen)


def asked(way: str, rng: random.Random) -> types_pb2.GenerationSpec:
    """A spec that ends in this way."""
    prompt = [rng.randrange(4000) for _ in range(rng.choice((1, 30, 200)))]
    wanted = spec(prompt, 300 if way == "by id" else rng.randrange(1, 12))
    if way == "stops":
        wanted.stop.token_ids.extend(range(0, 4000, 3))
    if way == "several":
        wanted.sampling.n, wanted.sampling.temperature = 3, 1.0
    if way == "too long":
        wanted.text = "def f(x): return x\n" * 2000
    if way == "refused":
        wanted.sampling.top_p = 7.0
    return wanted


async def streamed(stub: Stub, way: str, wanted: types_pb2.GenerationSpec, seen: Seen) -> None:
    """Reads a stream to its end; "by id" cancels it as soon as it is accepted."""
    call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=60)
    try:
        async for event in call:
            if way == "by id" and event.HasField("accepted"):
                name = event.accepted.generation_id
                await stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id=name))
            if event.HasField("finished"):
                seen.used(event.finished.usage, well=True)
        seen.ends["OK"] += 1
    except grpc.aio.AioRpcError as error:
        failed(error, seen)


async def talk(stub: Stub, rng: random.Random, seen: Seen) -> None:
    """Four generations on one stream: one succeeds, one misses its deadline, one is cancelled, one is refused."""
    call = stub.Converse(timeout=60)
    late, wrong = inference_pb2.Open(spec=spec([1, 2], 1500)), inference_pb2.Open(spec=spec([1], 4, top_p=7.0))
    late.deadline.FromMilliseconds(rng.choice((1, 60)))
    long = inference_pb2.Open(spec=spec([3], 1500))
    for tag, wanted in enumerate((inference_pb2.Open(spec=asked("well", rng)), late, long, wrong), 1):
        await call.write(inference_pb2.ConverseRequest(tag=tag, open=wanted))
    await call.write(inference_pb2.ConverseRequest(tag=3, cancel=inference_pb2.Cancel()))
    left = 4
    while left:
        frame = await call.read()
        assert isinstance(frame, inference_pb2.ConverseResponse), "the stream ended early"
        if frame.HasField("finished"):
            seen.ends["OK"] += 1
            seen.used(frame.finished.usage, well=True)
        elif frame.HasField("failed") and frame.failed.generation_id:
            seen.ends[grpc_name(frame.failed.code)] += 1
            seen.used(frame.failed.usage)
        elif frame.HasField("failed"):
            seen.refused[reason_of(frame.failed.details)] += 1
        left -= frame.HasField("finished") or frame.HasField("failed")
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


def grpc_name(code: int) -> str:
    """The name of a status."""
    return next(one.name for one in grpc.StatusCode if one.value[0] == code)


def reason_of(details: Iterable[any_pb2.Any]) -> str:
    """The reason in the error's ErrorInfo."""
    info = error_details_pb2.ErrorInfo()
    assert next(iter(details)).Unpack(info)
    return str(info.reason)


def failed(error: grpc.aio.AioRpcError, seen: Seen) -> None:
    """Counts an error; an admitted request has its generation id in the trailers."""
    trailers = {key: value for key, value in error.trailing_metadata() or ()}
    details = list(rpc_status.from_call(error).details)
    if "x-sluice-generation-id" not in trailers:
        seen.refused[reason_of(details)] += 1
        return
    seen.ends[error.code().name] += 1
    usage = types_pb2.Usage()
    for detail in details:
        if detail.Unpack(usage):
            seen.used(usage)


async def storm(service: Service, seen: Seen) -> None:
    rng = random.Random(11)
    left = iter(range(NUM))
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: Stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def work() -> None:
            for _ in left:
                await one(stub, rng.choice(WAYS), rng, seen)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        for way in WAYS:  # when there is room: the storm may have left one out
            await one(stub, way, rng, seen)


def scraped(port: int) -> dict[str, Counter[tuple[str, ...]]]:
    """Values at an endpoint by sample name and labels, without the metrics of the process itself."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for key, value in sorted(sample.labels.items()) if key not in ("role", "process"))
            found.setdefault(sample.name, Counter())[labels] += sample.value  # type: ignore[assignment] # a float
    return found


def by_label(counts: Iterable[tuple[tuple[str, ...], float]], at: int) -> dict[str, float]:
    """Sums by one label."""
    sums: Counter[str] = Counter()
    for labels, value in counts:
        sums[labels[at]] += value  # type: ignore[assignment] # a float
    return {name: num for name, num in sums.items() if num}


def test_counters_add_up_to_what_clients_saw() -> None:
    collector, seen, first = Collector(), Seen(), free_ports(4)[0]
    with contextlib.ExitStack() as stack:
        stack.callback(collector.stop)
        options = ["--metrics-port", str(first), "--otlp-endpoint", collector.endpoint, "--max-num-seqs", "8"]
        service = stack.enter_context(serve(*options, "--max-open-requests", "10"))
        ports = {role: first + i for i, role in enumerate(ROLES)}
        asyncio.run(storm(service, seen))
        wait_until(
            lambda: not any(scraped(port)["sluice_requests_open"].total() for port in ports.values()), 60, "open"
        )
        gateway, engine = scraped(ports["gateway"]), scraped(ports["engine"])
    assert set(seen.ends) == {"OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}
    assert {"INVALID_PARAMETER"} <= set(seen.refused) <= {"INVALID_PARAMETER", "QUEUE_FULL"}
    assert by_label(gateway["sluice_requests_total"].items(), 0) == seen.ends
    assert by_label(gateway["sluice_refusals_total"].items(), 0) == seen.refused
    tokens = by_label(gateway["sluice_tokens_total"].items(), 0)
    assert {kind: tokens.get(kind, 0) for kind in KINDS} == {kind: seen.tokens[kind] for kind in KINDS}
    assert gateway["sluice_request_prompt_tokens_sum"].total() == seen.tokens["prompt"]
    assert gateway["sluice_request_output_tokens_sum"].total() == seen.tokens["completion"]
    assert gateway["gen_ai_server_request_duration_seconds_count"].total() == seen.ends.total()
    assert gateway["gen_ai_server_time_to_first_token_seconds_count"].total() == seen.num_with_tokens
    # Behind the gateway: what the tokenizer let through, and the gateway's own first token.
    ends = by_label(engine["sluice_engine_requests_total"].items(), 0)
    assert sum(ends.values()) <= seen.ends.total() + 1
    assert ends["finished"] >= 1 + seen.num_whole
    assert engine["sluice_cache_blocks"]["used", "device"] == 0
    assert engine["sluice_engine_step_time_seconds_count"] == engine["sluice_engine_steps_total"]
    pushed = {point.attributes["code"]: 0.0 for point in collector.points("sluice.requests")}
    for point in collector.points("sluice.requests"):
        pushed[point.attributes["code"]] += point.value
    assert pushed == seen.ends, "what OTLP brought differs from what Prometheus saw"
