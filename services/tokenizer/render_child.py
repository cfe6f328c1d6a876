"""Runs the child process that renders chat templates, one after another, until its input ends.

Templates run in this process only. Its parent limits its time; its memory is limited here. It holds no secrets, sockets
or files.
"""

from sluice_server.services.tokenizer.child_pipe import Ready, Unready, begin, confine, receive, send, serve
from sluice_server.services.tokenizer.control_tokens import ContentMarker
from sluice_server.services.tokenizer.placing import CallInstructions, placed
from sluice_server.services.tokenizer.render_frames import (
    Answer,
    NoPlaceForTools,
    Rendered,
    RenderJob,
    RenderSetup,
    TemplateError,
    TemplateRefusal,
    TooLong,
)
from sluice_server.services.tokenizer.template import FAULTS, RefusedError, Template, TooLongError, explained


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(RenderSetup)
    if setup is None:
        return
    confine(setup.memory_bytes)
    marker = ContentMarker(setup.control_tokens, setup.written_tokens)
    try:
        default = Template(setup.default, setup.special_tokens, marker)
        tool_use = Template(setup.tool_use, setup.special_tokens, marker) if setup.tool_use else default
    except (*FAULTS, MemoryError):
        send(Unready())
        return
    send(Ready())
    serve(RenderJob, lambda job: _answer(tool_use if job.prompt.tools else default, job, setup.placement))


def _answer(template: Template, job: RenderJob, placement: CallInstructions | None) -> Answer:
    try:
        if job.prompt.tools and not template.shows_tools:
            return _placed(template, job, placement)
        return Rendered(*template.render(job.prompt, job.max_bytes))
    except RefusedError as error:
        return TemplateRefusal(str(error))
    except (TooLongError, MemoryError):
        return TooLong()
    except FAULTS as error:
        return TemplateError(explained(error))


def _placed(template: Template, job: RenderJob, placement: CallInstructions | None) -> Answer:
    """Renders the chat with its tools in the system turn, or in the user's first one if the template drops that."""
    for in_system in (True, False):
        if placement is None:
            break
        try:
            made = template.render(placed(job.prompt, placement, in_system=in_system), job.max_bytes)
        except RefusedError:
            if not in_system:
                raise
            continue
        if placement.instructions in made.text:
            return Rendered(*made, are_tools_placed=True)
    return NoPlaceForTools()


if __name__ == "__main__":
    main()
