"""Frames of one generation of Converse, as its client sends them. Pure."""

from google.protobuf.duration_pb2 import Duration

from sluice.progress import Progress
from sluice.v1 import inference_pb2, types_pb2


class Frames:
    """Makes the frames of one generation, under its tag.

    Attributes:
        has_appended: the prompt was appended to, so that another server cannot resume the generation.
    """

    def __init__(self, tag: int, progress: Progress) -> None:
        self.has_appended = False
        self._tag = tag
        self._progress = progress

    def open(
        self, spec: types_pb2.GenerationSpec, keep_input_open: bool, timeout_s: float | None
    ) -> inference_pb2.ConverseRequest:
        """The first frame of the generation."""
        opening = inference_pb2.Open(spec=spec, keep_input_open=keep_input_open or None, joined_frames=True)
        if timeout_s is not None:
            deadline = Duration()
            deadline.FromNanoseconds(int(timeout_s * 1e9))
            opening.deadline.CopyFrom(deadline)
        self.has_appended = keep_input_open
        return inference_pb2.ConverseRequest(tag=self._tag, open=opening)

    def grant(self, tokens: int) -> inference_pb2.ConverseRequest:
        """A grant of more credit."""
        return inference_pb2.ConverseRequest(tag=self._tag, grant=inference_pb2.Grant(tokens=tokens))

    def append(self, piece: str | list[int]) -> inference_pb2.ConverseRequest:
        """A frame with more prompt: text or ids."""
        append = inference_pb2.Append()
        if isinstance(piece, str):
            append.text = piece
        else:
            append.token_ids.ids.extend(piece)
        return inference_pb2.ConverseRequest(tag=self._tag, append=append)

    def close_input(self) -> inference_pb2.ConverseRequest:
        """The frame that says that the prompt is complete."""
        return inference_pb2.ConverseRequest(tag=self._tag, close_input=inference_pb2.CloseInput())

    def update(self, update: inference_pb2.Update) -> inference_pb2.ConverseRequest:
        """A change of parameters, also noted for a resumption."""
        self._progress.update(update)
        return inference_pb2.ConverseRequest(tag=self._tag, update=update)

    def cancel(self) -> inference_pb2.ConverseRequest:
        """The frame that cancels the generation."""
        return inference_pb2.ConverseRequest(tag=self._tag, cancel=inference_pb2.Cancel())
