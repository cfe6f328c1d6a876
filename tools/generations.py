"""Requests generations from a running service, some of them interrupted by the death of a process. For
`compose_check`."""

import concurrent.futures
import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

import grpc
from google.rpc import code_pb2
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

KILL_AT, GRANT, PACE_S = 50, 8, 0.01  # tokens before the kill; tokens per grant during it; seconds between grants
MAX_REFUSED_S = 15.0  # how long requests may be refused after a process was replaced


class Check(Exception):
    """A check failed."""


class NotAdmitted(Exception):
    """A generation was not admitted."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@contextlib.contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    """Yields a channel with its own connections, so that the back-off of an earlier one has no effect."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(address, options=options) as opened:
        yield opened


def spec_of(num: int) -> types_pb2.GenerationSpec:
    """Returns the spec of a greedy generation of `num` tokens."""
    sampling = types_pb2.SamplingParams(max_tokens=num, temperature=0.0)
    return types_pb2.GenerationSpec(
        text="def mean(values):", sampling=sampling, stop=types_pb2.StopConditions(ignore_eos=True)
    )


def stream(address: str, num: int, trace_id: str = "") -> str:
    """Returns the text of a generation of `num` tokens."""
    metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),) if trace_id else ()
    request = inference_pb2.StreamGenerateRequest(spec=spec_of(num))
    with channel(address) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        events = stub.StreamGenerate(request, metadata=metadata, timeout=120)
        return text_of((one.delta for one in events if one.HasField("delta")), num)


def text_of(deltas: Iterable[types_pb2.Delta], num: int) -> str:
    """Returns the text of all deltas. Raises Check unless they have `num` tokens."""
    text, num_tokens, longest_s, last_s = "", 0, 0.0, time.monotonic()
    for delta in deltas:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s if num_tokens else 0.0), now_s
        text += delta.text
        num_tokens += delta.consumed
    if num_tokens != num:
        raise Check(f"{num_tokens} tokens came instead of {num}")
    say(f"streamed {num_tokens} tokens; the longest pause was {longest_s:.2f} s")
    return text


class Interrupted:
    """A generation during which a process is killed and started again.

    Its credit is too small for its end until the process is back, so that it cannot end before the kill on a fast
    machine.
    """

    def __init__(self, address: str, num: int, interrupt: Callable[[], object]) -> None:
        """`interrupt` kills a process, and returns when it has been started again."""
        self._address = address
        self._num = num
        self._interrupt = interrupt
        self._frames: queue.SimpleQueue[inference_pb2.ConverseRequest | None] = queue.SimpleQueue()

    def text(self) -> str:
        """Returns the text. Tries again while the generation is refused, as after the loss of another process."""
        end = time.monotonic() + MAX_REFUSED_S
        while True:
            try:
                return self._once()
            except NotAdmitted as refused:
                if time.monotonic() > end:
                    raise Check(f"not let in for {MAX_REFUSED_S:.0f} s: {refused}") from None
            say("not let in yet: asking again")
            time.sleep(1.0)

    def _once(self) -> str:
        spec = spec_of(self._num)
        spec.credit_window = KILL_AT
        self._frames = queue.SimpleQueue()
        self._put(open=inference_pb2.Open(spec=spec))
        with channel(self._address) as opened, concurrent.futures.ThreadPoolExecutor(1) as beside:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            events = stub.Converse(iter(self._frames.get, None), timeout=120)
            try:
                return text_of(self._deltas(events, beside), self._num)
            finally:
                self._frames.put(None)

    def _deltas(
        self, events: Iterable[inference_pb2.ConverseResponse], beside: concurrent.futures.Executor
    ) -> Iterator[types_pb2.Delta]:
        num_tokens, killing = 0, None
        for event in events:
            match event.WhichOneof("frame"):
                case "failed" if not num_tokens and event.failed.code == code_pb2.UNAVAILABLE:
                    raise NotAdmitted(event.failed.message)
                case "failed":
                    raise Check(f"the generation failed after {num_tokens} tokens: {event.failed.message}")
                case "finished":
                    return
                case "delta":
                    yield event.delta
                    num_tokens += event.delta.consumed
            if num_tokens >= KILL_AT and killing is None:
                killing = beside.submit(self._kill)

    def _kill(self) -> None:
        """Interrupt while tokens are granted, a few at a time but never all; then grant the rest."""
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            restarted = beside.submit(self._interrupt)
            for _ in range(KILL_AT, self._num - GRANT, GRANT):
                self._put(grant=inference_pb2.Grant(tokens=GRANT))
                if restarted in concurrent.futures.wait([restarted], PACE_S).done:
                    break
            restarted.result()
            self._put(grant=inference_pb2.Grant(tokens=self._num))

    def _put(self, **frame: inference_pb2.Open | inference_pb2.Grant) -> None:
        self._frames.put(inference_pb2.ConverseRequest(tag=1, **frame))  # type: ignore[arg-type] # one of a oneof
