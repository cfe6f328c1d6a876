"""Runs the child process that decodes images, one after another, until its input ends.

Images are decoded in this process only. Its parent limits its time; its memory is limited here. It holds no secrets,
sockets or files, and its priority is lower than that of the engine and the stages.
"""

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import digest_of
from sluice_server.services.media.image_frames import ImageAnswer, ImageJob, ImageSetup, Prepared, RefusedImage
from sluice_server.services.media.pixels import prepare
from sluice_server.services.process.background import lower_process
from sluice_server.services.tokenizer.child_pipe import ChildReady, begin, confine, receive, send, serve


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(ImageSetup)
    if setup is None:
        return
    lower_process()
    confine(setup.memory_bytes)
    send(ChildReady())
    serve(ImageJob, lambda job: answered(job, setup))


def answered(job: ImageJob, setup: ImageSetup) -> ImageAnswer:
    """Answers one job."""
    try:
        found = prepare(job.data, setup.processor, setup.limits, media_type=job.media_type)
        pixels = found.pixels.tobytes()
        return Prepared(pixels, digest_of(found.grid, pixels), found.grid)
    except ServiceError as error:
        return RefusedImage(error.message.removeprefix(f"{error.field}: "), dict(error.details))


if __name__ == "__main__":
    main()
