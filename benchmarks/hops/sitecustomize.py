"""On PYTHONPATH of a service whose first tokens are followed: each process notes when it does what for a request.

Python runs this at its start. Marks are kept in memory and written at the end to HOPS_DIR, a file a process: lines of
CLOCK_MONOTONIC seconds, which all processes of a machine share, and a name. `benchmarks.first_token` reads them.
"""

import atexit
import functools
import inspect
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_server.services.messages.messages import Message
    from sluice_server.services.ring.backlog import Refusal
    from sluice_server.services.ring.loop import RingLoop
    from sluice_server.services.ring.sockets import Inbox, Outbox
    from sluice_server.services.ring.stage import Stage

OF_REQUESTS = frozenset({"Submit", "Prompt", "Tokens", "Text"})
PLACES = {  # by module and class: methods whose begin and end are noted
    ("sluice_server.services.gateway.calls.inference", "Inference"): ("stream_generate",),
    ("sluice_server.services.gateway.requests.progress", "WriteProgress"): ("begin_write", "end_write"),
    ("sluice_server.services.tokenizer.stage", "TokenizerStage"): ("_answer",),  # of trees that have no `answers`
    ("sluice_server.services.tokenizer.answers", "Answers"): ("answer",),
    ("sluice_server.engine.engine", "Engine"): ("step", "_plan"),
    ("sluice_server.engine.models.model", "Model"): ("forward", "logits"),
    ("sluice_server.engine.sampling.sampler", "Sampler"): ("sample",),
}
marks: list[tuple[float, str]] = []


def note(name: str) -> None:
    """Notes a mark with the present time."""
    marks.append((time.monotonic(), name))


def follow(owner: type, method: str) -> None:
    """Notes the begin and end of a method, if this tree has it."""
    plain = vars(owner).get(method)
    if plain is None:
        return
    name = method.strip("_")

    @functools.wraps(plain)
    def noted(*args: object, **kwargs: object) -> object:
        note(name)
        try:
            return plain(*args, **kwargs)
        finally:
            note(f"{name} done")

    @functools.wraps(plain)
    async def awaited(*args: object, **kwargs: object) -> object:
        note(name)
        try:
            return await plain(*args, **kwargs)
        finally:
            note(f"{name} done")

    setattr(owner, method, awaited if inspect.iscoroutinefunction(plain) else noted)


def follow_sockets(inbox: "type[Inbox]", outbox: "type[Outbox]") -> None:
    """Notes received messages, and those handed to ZeroMQ."""
    drain, put, send = inbox.drain, outbox.put, outbox._send
    waiting: set[str] = set()  # in any outbox: a role whose first tokens are followed has one peer

    def drained(self: "Inbox") -> "list[Message]":
        begun = time.monotonic()
        came = drain(self)
        for name in {type(one).__name__ for one in came} & OF_REQUESTS:
            marks.append((begun, f"woken by {name}"))
        return came

    def queued(self: "Outbox", message: "Message") -> "Refusal | None":
        waiting.add(type(message).__name__)
        return put(self, message)

    def sent(self: "Outbox", messages: "list[bytes]") -> bool:
        begun = time.monotonic()
        for name in waiting & OF_REQUESTS:
            marks.append((begun, f"sent {name}"))
        waiting.clear()
        return send(self, messages)

    setattr(inbox, "drain", drained)  # noqa: B010 # a method is replaced
    setattr(outbox, "put", queued)  # noqa: B010 # likewise
    setattr(outbox, "_send", sent)  # noqa: B010 # likewise


def begin(process_id: str) -> None:
    """Begins once all modules of a role are loaded."""
    sockets = sys.modules["sluice_server.services.ring.sockets"]
    follow_sockets(sockets.Inbox, sockets.Outbox)
    for (module, owner), methods in PLACES.items():
        if module in sys.modules:
            for method in methods:
                follow(getattr(sys.modules[module], owner), method)
    path = Path(os.environ["HOPS_DIR"]) / process_id
    atexit.register(lambda: path.write_text("".join(f"{at:.7f} {name}\n" for at, name in marks)))


def watch(ring: "type[RingLoop]") -> None:
    """Begins when a process starts its loop."""
    start = ring.start

    def started(self: "RingLoop", stage: "Stage") -> None:
        begin(self.process_id)
        start(self, stage)

    setattr(ring, "start", started)  # noqa: B010 # a method is replaced


if {"SLUICE_ROLE", "SLUICE_TEMPLATE"} & os.environ.keys():  # a process that is spawned, and one that forks others
    from sluice_server.services.ring.loop import RingLoop

    watch(RingLoop)
