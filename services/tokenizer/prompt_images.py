"""Fills images into prompts whose text is encoded: the ids that stand for each (`image_places`), and its pixels.

Pixels are prepared elsewhere, image by image, in a fair queue; a request's message waits for all of its own.
"""

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import msgspec

from sluice_server.engine.checks import check_prompt
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.media.preparing import PixelCache, PreparedPixels
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Append, Prompt, Result, Submit, failed
from sluice_server.services.messages.work import Generate, ImageFile, pack_ids, unpack_ids
from sluice_server.services.tokenizer.answers import EncodedMessage
from sluice_server.services.tokenizer.awaiting import cancelling, later
from sluice_server.services.tokenizer.fair_executor import FairExecutor
from sluice_server.services.tokenizer.image_places import with_places

MAX_WAITING_BYTES = 64 << 20  # of one tenant


class PromptImages:
    """Fills images into prompts that are encoded."""

    def __init__(self, pixels: PixelCache, limits: Limits, executor: Executor) -> None:
        """`executor` has a thread for each process that decodes."""
        self.pixels = pixels
        self.limits = limits
        self._queue: FairExecutor[PreparedPixels] = FairExecutor(executor, MAX_WAITING_BYTES)

    def follow(self, message: Submit | Append, first: "Future[EncodedMessage]") -> "Future[EncodedMessage]":
        """Returns a future of what `first` gives, with the message's images if it has any."""
        work = message.work if isinstance(message, Submit) else None
        if not isinstance(work, Generate) or not work.images:
            return first
        return _Following(self, message.envelope.tenant, work.images, first).whole

    def submit(self, tenant: str, image: ImageFile) -> "Future[PreparedPixels]":
        """Queues an image. Raises ServiceError QUEUE_FULL."""
        return self._queue.submit(tenant, len(image.data), lambda: self.pixels.prepare(image))


class _Following:
    """One message whose images are being prepared: `whole` is its future."""

    def __init__(
        self, images: PromptImages, tenant: str, files: Sequence[ImageFile], first: "Future[EncodedMessage]"
    ) -> None:
        self.whole: Future[EncodedMessage] = Future()
        self._images, self._tenant, self._files = images, tenant, files
        self._lock = threading.Lock()
        self._jobs: list[Future[PreparedPixels]] = []
        self._start = 0.0
        self._forget = cancelling(self.whole, first)
        first.add_done_callback(self._begin)

    def _begin(self, first: "Future[EncodedMessage]") -> None:
        self._forget()
        if first.cancelled() or not self.whole.set_running_or_notify_cancel():
            return
        if (error := first.exception()) is not None:
            self.whole.set_exception(error)
            return
        made = first.result()
        if not isinstance(made.answer, Prompt):
            self.whole.set_result(made)
            return
        self._start = time.monotonic()
        left = len(self._files)

        def done(_: "Future[PreparedPixels]") -> None:
            nonlocal left
            with self._lock:
                left -= 1
                is_last = not left
            if is_last:
                self._end(made)

        try:
            self._jobs = [self._images.submit(self._tenant, one) for one in self._files]
        except ServiceError as full:
            self.whole.set_result(EncodedMessage(failed(made.answer.envelope, full)))
            return
        for job in self._jobs:
            job.add_done_callback(done)

    def _end(self, made: EncodedMessage) -> None:
        try:
            self.whole.set_result(self._filled(made))
        except Exception as error:
            self.whole.set_exception(error)

    def _filled(self, made: EncodedMessage) -> EncodedMessage:
        assert isinstance(made.answer, Prompt)
        end = time.monotonic()
        envelope = later(made.answer.envelope, end - self._start)
        try:
            jobs, self._jobs = self._jobs, []  # each of which has this object among what it calls
            found = [job.result() for job in jobs]
            prompt = _with_images(made.answer, found, self._images.limits)
        except ServiceError as error:
            return EncodedMessage(failed(envelope, error))
        prompt, report = msgspec.structs.replace(prompt, envelope=envelope), made.prompt_report
        if report is not None:
            report = _reported(report, prompt)
        return msgspec.structs.replace(made, answer=prompt, prompt_report=report, images_s=(self._start, end))


def _with_images(prompt: Prompt, found: Sequence[PreparedPixels], limits: Limits) -> Prompt:
    """Returns the prompt with its images. Raises ServiceError for one that is too long with them."""
    assert limits.images is not None, "images are prepared for models that take them"
    ids, places = with_places(unpack_ids(prompt.ids), [one.grid for one in found], limits.images)
    check_prompt(len(ids), prompt.params, limits)
    images = tuple(
        dataclasses.replace(place, digest=one.digest, pixels=one.pixels)
        for place, one in zip(places, found, strict=True)
    )
    return msgspec.structs.replace(prompt, ids=pack_ids(ids), images=images)


def _reported(report: Result, prompt: Prompt) -> Result:
    """Returns the report of a prompt's tokens with those of its images."""
    assert isinstance(report.value, Tokenized)
    return msgspec.structs.replace(report, value=msgspec.structs.replace(report.value, ids=prompt.ids))
