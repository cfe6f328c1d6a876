"""A client of Converse for tests: sends and reads single frames."""

from typing import Any

import grpc
from google.rpc import error_details_pb2
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.messages.messages import Message, Submit
from tests.services.gateway.fake_ring import Rig, spec


class Talker:
    """One stream of Converse."""

    def __init__(self, rig: Rig, timeout: float | None = None) -> None:
        self.rig = rig
        self.call = rig.stub.Converse(timeout=timeout)

    async def send(self, tag: int, **frame: Any) -> None:  # noqa: ANN401  # any frame
        await self.call.write(inference_pb2.ConverseRequest(tag=tag, **frame))

    async def open(self, tag: int, *, keep_input_open: bool = False, **fields: Any) -> Submit:  # noqa: ANN401 # of a spec
        """Opens a generation; returns the message that reached the ring."""
        num = len(self.rig.ring.submits)
        opened = inference_pb2.Open(spec=spec(**fields), keep_input_open=keep_input_open or None)
        await self.send(tag, open=opened)
        await self.rig.ring.until(lambda: len(self.rig.ring.submits) > num)
        return self.rig.ring.submits[-1]

    async def read(self) -> inference_pb2.ConverseResponse:
        frame = await self.call.read()
        assert isinstance(frame, inference_pb2.ConverseResponse), "the stream has ended"
        return frame

    async def kinds(self, num: int) -> list[tuple[int, str | None]]:
        """The (tag, kind) of the next frames."""
        frames = [await self.read() for _ in range(num)]
        return [(frame.tag, frame.WhichOneof("frame")) for frame in frames]

    async def failure(self) -> tuple[int, inference_pb2.Failed, error_details_pb2.ErrorInfo]:
        """The next frame, which is a failure: its tag, its error and its ErrorInfo."""
        frame = await self.read()
        info = error_details_pb2.ErrorInfo()
        assert frame.WhichOneof("frame") == "failed" and frame.failed.details[0].Unpack(info), frame
        return frame.tag, frame.failed, info

    async def rest(self) -> list[inference_pb2.ConverseResponse]:
        """Half-closes, and returns all frames to the end."""
        await self.call.done_writing()
        return await self.remaining()

    async def remaining(self) -> list[inference_pb2.ConverseResponse]:
        """All frames to the end. Raises the error that ended the stream."""
        frames = []
        while isinstance(frame := await self.call.read(), inference_pb2.ConverseResponse):
            frames.append(frame)
        return frames

    async def end(self) -> grpc.StatusCode:
        """Half-closes and reads to the end."""
        await self.rest()
        return await self.call.code()

    async def emitted(self, kind: type[Message], num: int = 1) -> list[Any]:
        """The messages of that kind for the ring, as soon as there are that many."""
        found: list[Any] = []

        def enough() -> bool:
            found[:] = [one for one in self.rig.ring.emitted if isinstance(one, kind)]
            return len(found) >= num

        await self.rig.ring.until(enough)
        return found


def ids(*values: int) -> types_pb2.TokenIds:
    return types_pb2.TokenIds(ids=values)
