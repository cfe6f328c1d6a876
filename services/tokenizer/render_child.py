"""Runs the child process that renders chat templates, one after another, until its input ends.

Templates run in this process only. Its parent limits its time; its memory is limited here. It holds no secrets, sockets
or files.
"""

from sluice_server.services.tokenizer.child_pipe import Ready, Unready, begin, confine, receive, send, serve
from sluice_server.services.tokenizer.render_frames import (
    Answer,
    Rendered,
    RenderJob,
    RenderSetup,
    TemplateError,
    TemplateRefusal,
    TooLong,
)
from sluice_server.services.tokenizer.template import FAULTS, RefusedError, Template, TooLongError


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(RenderSetup)
    if setup is None:
        return
    confine(setup.memory_bytes)
    try:
        default = Template(setup.default, setup.special_tokens)
        tool_use = Template(setup.tool_use, setup.special_tokens) if setup.tool_use else default
    except (*FAULTS, MemoryError):
        send(Unready())
        return
    send(Ready())
    serve(RenderJob, lambda job: _answer(tool_use if job.prompt.tools else default, job))


def _answer(template: Template, job: RenderJob) -> Answer:
    try:
        return Rendered(template.render(job.prompt, job.max_bytes))
    except RefusedError as error:
        return TemplateRefusal(str(error))
    except (TooLongError, MemoryError):
        return TooLong()
    except FAULTS:
        return TemplateError()


if __name__ == "__main__":
    main()
