"""Runs the child process that encodes long texts, one after another, until its input ends. Its parent limits its time.

Its priority is lower than that of the engine and the other stages, which run on the same cores.
"""

from pathlib import Path

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.process.background import lower_process
from sluice_server.services.tokenizer.answers import Answers
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.child_pipe import ChildReady, Unready, begin, receive, send, serve
from sluice_server.services.tokenizer.encode_frames import EncoderSetup, Task
from sluice_server.services.tokenizer.encoding import TextEncoder, load_tokenizer


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(EncoderSetup)
    if setup is None:
        return
    lower_process()
    try:
        path = Path(setup.directory) / "tokenizer.json"
        encoder = TextEncoder(load_tokenizer(path), ChatTemplate(TemplateSource()), path)  # chats arrive rendered
    except ServiceError:
        send(Unready())
        return
    answers = Answers(encoder, setup.limits)
    send(ChildReady())
    # Encoding 1 MiB of text takes hundreds of MiB, which are returned after each task.
    serve(Task, lambda task: answers.answer(task.message, task.start, task.rendered), settle=give_back)


if __name__ == "__main__":
    main()
