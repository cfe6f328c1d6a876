"""Runs the child process that renders chat templates, one after another, until its input ends.

Templates run in this process only. Its parent limits its time; its memory is limited here. It holds no secrets, sockets
or files.
"""

from sluice_server.services.tokenizer.child_pipe import ChildReady, Unready, begin, confine, receive, send, serve
from sluice_server.services.tokenizer.control_tokens import ContentMarker
from sluice_server.services.tokenizer.open_message import ClosedError
from sluice_server.services.tokenizer.placing import CallInstructions, placed
from sluice_server.services.tokenizer.render_frames import (
    Answer,
    Closed,
    NoPlace,
    Rendered,
    RenderJob,
    RenderSetup,
    TemplateError,
    TemplateRefusal,
    TemplateSetup,
    TooLong,
)
from sluice_server.services.tokenizer.template import (
    FAULTS,
    RefusedError,
    Template,
    TooLongError,
    UnusedDocumentsError,
    explained,
)


class CompiledTemplates:
    """The templates of one setup, ready to render."""

    def __init__(self, setup: TemplateSetup) -> None:
        """Raises one of `FAULTS`, or MemoryError."""
        marker = ContentMarker(setup.control_tokens, setup.written_tokens)
        self.setup = setup
        self._default = Template(setup.default, setup.special_tokens, marker)
        self._tool_use = Template(setup.tool_use, setup.special_tokens, marker) if setup.tool_use else self._default

    def render(self, job: RenderJob) -> Answer:
        """Renders a chat. Raises as `Template.render`."""
        template = self._tool_use if job.prompt.tools else self._default
        if any(one.parts for one in job.prompt.messages) and not template.shows_images:
            return NoPlace("messages.parts.image", "images")
        if job.prompt.tools and not template.shows_tools:
            return _placed(template, job, self.setup.placement)
        return Rendered(*template.render(job.prompt, job.max_bytes))


class Renderer:
    """Answers jobs, with the checkpoint's templates or those that a job brings."""

    def __init__(self, own: CompiledTemplates | None) -> None:
        self._templates = own

    def answer(self, job: RenderJob) -> Answer:
        """Answers one job."""
        try:
            return self._of(job).render(job)
        except RefusedError as error:
            return TemplateRefusal(str(error))
        except UnusedDocumentsError:
            return NoPlace("documents")
        except ClosedError:
            return Closed()
        except (TooLongError, MemoryError):
            return TooLong()
        except FAULTS as error:
            return TemplateError(explained(error))

    def _of(self, job: RenderJob) -> CompiledTemplates:
        """Returns the templates of a job: those of the job before, if they are the same."""
        if job.templates is not None and (self._templates is None or self._templates.setup != job.templates):
            self._templates = None  # first, so that its memory is free for the next
            self._templates = CompiledTemplates(job.templates)
        assert self._templates is not None, "a process without templates gets jobs that bring theirs"
        return self._templates


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(RenderSetup)
    if setup is None:
        return
    confine(setup.memory_bytes)
    try:
        own = None if setup.templates is None else CompiledTemplates(setup.templates)
    except (*FAULTS, MemoryError):
        send(Unready())
        return
    send(ChildReady())
    serve(RenderJob, Renderer(own).answer)


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
    return NoPlace("tools")


if __name__ == "__main__":
    main()
