"""The answer of a call that returns a generation as a whole."""

import dataclasses

from sluice.v1 import inference_pb2, types_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """The answer of Generate. `response` is the whole message; the properties return its common parts."""

    response: inference_pb2.GenerateResponse

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.response.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first output; empty if token_records is false."""
        return [token.id for token in self.response.outputs[0].tokens]

    @property
    def outputs(self) -> list[types_pb2.Output]:
        """All outputs, by index."""
        return list(self.response.outputs)

    @property
    def finish_reason(self) -> str:
        """Why the first output ended: length, eos, stop_token, stop_string or cancelled."""
        return finish_name(self.response.outputs[0].finish_reason)

    @property
    def usage(self) -> types_pb2.Usage:
        """Tokens used."""
        return self.response.usage

    @property
    def timings(self) -> types_pb2.Timings:
        """Where the time went."""
        return self.response.timings


def finish_name(reason: "types_pb2.FinishReason.ValueType") -> str:
    """length, eos, stop_token, stop_string or cancelled."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
