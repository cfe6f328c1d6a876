"""Blocking sessions: many generations on one Converse call, each with its own credit. One thread reads the call.

When the call is lost, its generations continue by ResumeGenerate, and later ones are opened on a new call. Nothing is
written to a call after its server has ended it: grpc reports the status on the read side.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc

from sluice import errors
from sluice.attempts import Attempts
from sluice.credit import DEFAULT_WINDOW, Credit
from sluice.frames import Frames
from sluice.pool import Pool
from sluice.progress import Progress
from sluice.spec import GenerateOptions, Prompt, build
from sluice.stream import Line, Metadata, Stream
from sluice.v1 import inference_pb2, types_pb2

MakeAttempts: TypeAlias = Callable[[float | None, Progress | None], Attempts]
News: TypeAlias = inference_pb2.ConverseResponse | errors.SluiceError
CLOSE_TIMEOUT_S = 5.0
PONG_TIMEOUT_S = 10.0


class Session:
    """A session. Leaving its `with` block cancels the generations that still run."""

    def __init__(self, pool: Pool[Line], attempts: MakeAttempts, metadata: Metadata) -> None:
        self._pool = pool
        self._attempts = attempts
        self._metadata = metadata
        self._wires: list[Wire] = []  # new generations go to the last; those before it finish
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for wire in self._wires:
            wire.close()

    def open(
        self,
        prompt: Prompt,
        *,
        window: int | None = DEFAULT_WINDOW,
        grants: bool = True,
        keep_input_open: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "Generation":
        """Starts a generation.

        Args:
            window: how many tokens the server may sample ahead of the reader; None is no limit.
            grants: whether the client grants credit for tokens that were read; if not, call `grant`.
            keep_input_open: sampling waits for `close_input`; `append` extends the prompt until then.
            timeout_s: timeout of the generation.
        """
        spec = build(prompt, options)
        if window is not None:
            spec.credit_window = window
        progress = Progress(spec)
        attempts = self._attempts(timeout_s, progress)
        rest = Stream(self._pool, progress, attempts, self._metadata)
        wire = self._open_wire()
        generation = Generation(wire, rest, Credit((window or 0) if grants else 0))
        wire.start(generation, generation.frames.open(spec, keep_input_open, timeout_s))
        return generation

    def ping(self) -> None:
        """Sends a ping and waits for the answer. Raises SluiceError if the call is lost or no answer comes."""
        self._open_wire().ping()

    def _open_wire(self) -> "Wire":
        with self._lock:
            if not self._wires or not self._wires[-1].takes_more:
                self._wires = [*(one for one in self._wires if not one.is_lost), Wire(self._pool, self._metadata)]
            return self._wires[-1]


class Generation:
    """One generation of a session: iterate over its deltas. Raises SluiceError if it fails.

    Attributes:
        progress: what was received so far: `accepted`, `prompt_info`, `ends` by output, `finished`.
    """

    def __init__(self, wire: "Wire", rest: Stream, credit: Credit) -> None:
        self.progress = rest.progress
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.frames = Frames(wire.next_tag(), rest.progress)
        self._wire = wire
        self._rest = rest
        self._credit = credit

    @property
    def num_broken(self) -> int:
        """How often the connection was lost and the generation resumed."""
        return self._rest.num_broken

    def __iter__(self) -> Iterator[types_pb2.Delta]:
        while self.progress.finished is None:
            news = self.news.get()
            if isinstance(news, errors.SluiceError):
                self._rest.after(news, self._wire.lease, can_go_on=not self.frames.has_appended)
                yield from self._rest
                return
            delta = self.progress.take(news)
            if delta is not None:
                yield delta
                self.grant(self._credit.take(delta.consumed))

    def text(self) -> str:
        """Reads to the end and returns the rest of the first output's text."""
        return "".join(delta.text for delta in self if delta.output_index == 0)

    def grant(self, tokens: int) -> None:
        """Grants credit: the server may sample `tokens` more tokens; 0 does nothing."""
        if tokens:
            self._wire.send(self.frames.grant(tokens))

    def append(self, piece: str | list[int]) -> None:
        """Appends to the prompt while the input is open."""
        self._wire.send(self.frames.append(piece))

    def close_input(self) -> None:
        """Completes the prompt: sampling starts."""
        self._wire.send(self.frames.close_input())

    def update(self, update: inference_pb2.Update) -> None:
        """Changes sampling parameters from the next token on."""
        self._wire.send(self.frames.update(update))

    def cancel(self) -> None:
        """Cancels the generation; its iterator raises Cancelled."""
        self._wire.send(self.frames.cancel())
        if self._wire.is_lost:
            self._rest.cancel()


class Wire:
    """One Converse call: its generations by tag, and the thread that reads it."""

    def __init__(self, pool: Pool[Line], metadata: Metadata) -> None:
        self.takes_more = True
        self.is_lost = False
        self._pool = pool
        self.lease = pool.lease()
        self._tags = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._pongs: queue.SimpleQueue[errors.SluiceError | None] = queue.SimpleQueue()
        self._frames: queue.SimpleQueue[inference_pb2.ConverseRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        frames: Iterator[inference_pb2.ConverseRequest] = iter(self._frames.get, None)
        self._call = self.lease.line.inference.Converse(frames, metadata=metadata)
        self._reading = threading.Thread(target=self._read, name="sluice-converse", daemon=True)
        self._reading.start()

    def next_tag(self) -> int:
        """Returns a tag above all tags before it."""
        return next(self._tags)

    def start(self, generation: Generation, frame: inference_pb2.ConverseRequest) -> None:
        """Sends the open frame of a generation; frames with its tag are delivered to it from now on."""
        with self._lock:
            self._generations[frame.tag] = generation
            if not self.is_lost:
                self._frames.put(frame)
                return
        generation.news.put(errors.Unavailable("the stream of this session was lost"))

    def send(self, frame: inference_pb2.ConverseRequest) -> None:
        """Sends a frame; drops it if its generation has ended, as nothing is written after the end."""
        with self._lock:
            if not self.is_lost and frame.tag in self._generations:
                self._frames.put(frame)

    def ping(self) -> None:
        """Sends a ping and waits for its pong."""
        self._frames.put(inference_pb2.ConverseRequest(ping=inference_pb2.Ping()))
        try:
            lost = self._pongs.get(timeout=PONG_TIMEOUT_S)
        except queue.Empty:
            raise errors.DeadlineExceeded("the server did not answer a ping") from None
        if lost is not None:
            raise lost

    def close(self) -> None:
        """Cancels the call and waits for the thread that reads it: a thread still inside grpc when the interpreter ends
        may keep the process from ending."""
        self._frames.put(None)
        self._call.cancel()
        self._reading.join(CLOSE_TIMEOUT_S)

    def _read(self) -> None:
        lost: errors.SluiceError = errors.Unavailable("the server ended the stream of this session")
        try:
            for frame in self._call:
                self._deliver(frame)
                for further in frame.more:
                    self._deliver(further)
        except grpc.RpcError as error:
            lost = errors.from_rpc(error)
            self._pool.failed(self.lease.address, lost)
        with self._lock:
            self.is_lost, self.takes_more = True, False
            left = list(self._generations.values())
            self._frames.put(None)
        for generation in left:
            generation.news.put(lost)
        self._pongs.put(lost)
        self._pool.release(self.lease)

    def _deliver(self, frame: inference_pb2.ConverseResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "pong":
            self._pongs.put(None)
        elif kind == "going_away":
            self.takes_more = False
        elif (generation := self._generations.get(frame.tag)) is not None:
            generation.news.put(errors.from_failed(frame.failed) if kind == "failed" else frame)
            if kind in ("finished", "failed"):
                with self._lock:
                    del self._generations[frame.tag]
                    if not self.takes_more and not self._generations:
                        self._frames.put(None)  # the server waits for the half-close
