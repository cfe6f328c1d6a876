"""Sessions for asyncio: many generations on one Converse call, each with its own credit. One task reads the call.

When the call is lost, its generations continue by ResumeGenerate, and later ones are opened on a new call. Nothing is
written to a call after its server has ended it: grpc reports the status on the read side.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, Unpack

import grpc

from sluice import errors
from sluice.aio.stream import AsyncLine, AsyncStream
from sluice.credit import DEFAULT_WINDOW, Credit
from sluice.frames import Frames
from sluice.pool import Pool
from sluice.progress import Progress
from sluice.session import PONG_TIMEOUT_S, MakeAttempts, News
from sluice.spec import GenerateOptions, Prompt, build
from sluice.stream import Metadata
from sluice.v1 import inference_pb2, types_pb2


class AsyncSession:
    """A session. Leaving its `async with` block cancels the generations that still run."""

    def __init__(self, pool: Pool[AsyncLine], attempts: MakeAttempts, metadata: Metadata) -> None:
        self._pool = pool
        self._attempts = attempts
        self._metadata = metadata
        self._wires: list[AsyncWire] = []  # new generations go to the last; those before it finish

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for wire in self._wires:
            await wire.close()

    def open(
        self,
        prompt: Prompt,
        *,
        window: int | None = DEFAULT_WINDOW,
        grants: bool = True,
        keep_input_open: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "AsyncGeneration":
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
        rest = AsyncStream(self._pool, progress, attempts, self._metadata)
        wire = self._open_wire()
        generation = AsyncGeneration(wire, rest, Credit((window or 0) if grants else 0))
        wire.start(generation, generation.frames.open(spec, keep_input_open, timeout_s))
        return generation

    async def ping(self) -> None:
        """Sends a ping and waits for the answer. Raises SluiceError if the call is lost or no answer comes."""
        await self._open_wire().ping()

    def _open_wire(self) -> "AsyncWire":
        if not self._wires or not self._wires[-1].takes_more:
            self._wires = [*(one for one in self._wires if not one.is_lost), AsyncWire(self._pool, self._metadata)]
        return self._wires[-1]


class AsyncGeneration:
    """One generation of a session: `async for` yields its deltas. Raises SluiceError if it fails.

    Attributes:
        progress: what was received so far: `accepted`, `prompt_info`, `ends` by output, `finished`.
    """

    def __init__(self, wire: "AsyncWire", rest: AsyncStream, credit: Credit) -> None:
        self.progress = rest.progress
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.frames = Frames(wire.next_tag(), rest.progress)
        self._wire = wire
        self._rest = rest
        self._credit = credit

    @property
    def num_broken(self) -> int:
        """How often the connection was lost and the generation resumed."""
        return self._rest.num_broken

    async def __aiter__(self) -> AsyncGenerator[types_pb2.Delta, None]:
        while self.progress.finished is None:
            news = await self.news.get()
            if isinstance(news, errors.SluiceError):
                await self._rest.after(news, self._wire.lease, can_go_on=not self.frames.has_appended)
                async for rest in self._rest:
                    yield rest
                return
            delta = self.progress.take(news)
            if delta is not None:
                yield delta
                self.grant(self._credit.take(delta.consumed))

    async def text(self) -> str:
        """Reads to the end and returns the rest of the first output's text."""
        return "".join([delta.text async for delta in self if delta.output_index == 0])

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

    async def cancel(self) -> None:
        """Cancels the generation; its iterator raises Cancelled."""
        self._wire.send(self.frames.cancel())
        if self._wire.is_lost:
            await self._rest.cancel()


class AsyncWire:
    """One Converse call: its generations by tag, the task that reads it and the one that writes it."""

    def __init__(self, pool: Pool[AsyncLine], metadata: Metadata) -> None:
        self.takes_more = True
        self.is_lost = False
        self._pool = pool
        self.lease = pool.lease()
        self._tags = itertools.count(1)
        self._generations: dict[int, AsyncGeneration] = {}
        self._pongs: asyncio.Queue[errors.SluiceError | None] = asyncio.Queue()
        self._frames: asyncio.Queue[inference_pb2.ConverseRequest | None] = asyncio.Queue()
        self._call = self.lease.line.inference.Converse(metadata=metadata)
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    def next_tag(self) -> int:
        """Returns a tag above all tags before it."""
        return next(self._tags)

    def start(self, generation: AsyncGeneration, frame: inference_pb2.ConverseRequest) -> None:
        """Sends the open frame of a generation; frames with its tag are delivered to it from now on."""
        self._generations[frame.tag] = generation
        self._frames.put_nowait(frame)

    def send(self, frame: inference_pb2.ConverseRequest) -> None:
        """Sends a frame; drops it if its generation has ended, as nothing is written after the end."""
        if not self.is_lost and frame.tag in self._generations:
            self._frames.put_nowait(frame)

    async def ping(self) -> None:
        """Sends a ping and waits for its pong."""
        self._frames.put_nowait(inference_pb2.ConverseRequest(ping=inference_pb2.Ping()))
        try:
            lost = await asyncio.wait_for(self._pongs.get(), PONG_TIMEOUT_S)
        except TimeoutError:
            raise errors.DeadlineExceeded("the server did not answer a ping") from None
        if lost is not None:
            raise lost

    async def close(self) -> None:
        """Cancel the call and wait for both tasks."""
        self._call.cancel()
        self._frames.put_nowait(None)
        await asyncio.gather(*self._tasks)

    async def _write(self) -> None:
        """Writes frames until None. Errors of a write are ignored, since the read side gets the status."""
        try:
            while (frame := await self._frames.get()) is not None:
                await self._call.write(frame)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise

    async def _read(self) -> None:
        lost: errors.SluiceError = errors.Unavailable("the server ended the stream of this session")
        try:
            async for frame in self._call:
                self._deliver(frame)
                for further in frame.more:
                    self._deliver(further)
        except grpc.aio.AioRpcError as error:
            lost = errors.from_rpc(error)
            self._pool.failed(self.lease.address, lost)
        except asyncio.CancelledError:
            lost = errors.Cancelled("the session was closed")
            if not self._call.cancelled():
                raise
        finally:
            self.is_lost, self.takes_more = True, False
            self._frames.put_nowait(None)
            for generation in self._generations.values():
                generation.news.put_nowait(lost)
            self._pongs.put_nowait(lost)
            self._pool.release(self.lease)

    def _deliver(self, frame: inference_pb2.ConverseResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "pong":
            self._pongs.put_nowait(None)
        elif kind == "going_away":
            self.takes_more = False
        elif (generation := self._generations.get(frame.tag)) is not None:
            generation.news.put_nowait(errors.from_failed(frame.failed) if kind == "failed" else frame)
            if kind in ("finished", "failed"):
                del self._generations[frame.tag]
                if not self.takes_more and not self._generations:
                    self._frames.put_nowait(None)  # the server waits for the half-close
