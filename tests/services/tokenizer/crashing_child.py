"""A child process with a bug: every job raises an unexpected exception."""

from sluice_server.services.tokenizer.child_pipe import ChildReady, begin, receive, send, serve
from sluice_server.services.tokenizer.render_frames import Rendered, RenderJob, RenderSetup


def _answer(job: RenderJob) -> Rendered:
    raise RuntimeError("a bug in a child")


if __name__ == "__main__":
    begin()
    receive(RenderSetup)
    send(ChildReady())
    serve(RenderJob, _answer)
