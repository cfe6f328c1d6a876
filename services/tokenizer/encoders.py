"""Encodes long texts in child processes, so that they do not delay other requests.

Takes messages, gives `EncodedMessage`s. Thread-safe.
"""

from pathlib import Path

import msgspec

from sluice_server.engine.errors import invalid
from sluice_server.engine.request import Limits
from sluice_server.services.messages.messages import Append, Submit, failed
from sluice_server.services.tokenizer.answers import EncodedMessage
from sluice_server.services.tokenizer.child_pool import ChildPool, CpuTimeLimit, OverdueError
from sluice_server.services.tokenizer.encode_frames import EncoderSetup, Task
from sluice_server.services.tokenizer.encoding import RenderedChat

MODULE = "sluice_server.services.tokenizer.encode_child"
START_S = 10.0  # of CPU time: a vocabulary of 256,000 takes 2
JOB_S_PER_MIB = 10.0  # of CPU time; the slowest text measured took 1.8


class Encoders:
    """A pool of at most `num` encoding child processes."""

    def __init__(self, directory: Path, limits: Limits, num: int = 1, patience: CpuTimeLimit | None = None) -> None:
        job_s = JOB_S_PER_MIB * max(1.0, limits.max_prompt_bytes / (1 << 20))
        self._children: ChildPool[EncodedMessage] = ChildPool(
            MODULE,
            EncoderSetup(str(directory), limits),
            _decode,
            num,
            patience or CpuTimeLimit(START_S, job_s),
        )

    def answer(self, message: Submit | Append, start: float, rendered: RenderedChat | None) -> EncodedMessage:
        """Answers a message that arrived at `start`; `rendered` is its chat. Raises ChildError if a child fails."""
        try:
            return self._children.ask(Task(message, start, rendered))
        except OverdueError as error:
            limit = error.limit_s
            refused = invalid("prompt", f"did not encode within {limit:g} s: make it shorter", limit=limit)
            return EncodedMessage(failed(message.envelope, refused))

    def close(self) -> None:
        """Ends the children. No text may be in work."""
        self._children.close()


def _decode(answer: bytes) -> EncodedMessage:
    return msgspec.msgpack.decode(answer, type=EncodedMessage)
