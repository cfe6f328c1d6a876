"""Fetches the images of requests before these enter the ring, so that a replay has the same bytes."""

from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.services.faults import fault
from sluice_server.services.gateway.requests.images import images_of, with_images
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import ImageFile
from sluice_server.services.telemetry.logs import about

Fetch = Callable[[str, str], bytes]  # URL and field → file; raises ServiceError


class ImageFetches:
    """Requests whose images are being fetched."""

    def __init__(self, fetch: Fetch, executor: Executor, on_loop: Callable[[Callable[[], None]], object]) -> None:
        """`fetch` runs in `executor`; `on_loop` runs a callable on the event loop's thread."""
        self._fetch = fetch
        self._executor = executor
        self._on_loop = on_loop

    def begin(self, request: OpenRequest, then: Callable[[OpenRequest], None]) -> bool:
        """Fetches the images of a request that have URLs, then calls `then`; returns whether there are any."""
        if not any(one.url for one in images_of(request.asked)):
            return False
        request.awaits_images = True
        future = self._executor.submit(self._all, images_of(request.asked))
        future.add_done_callback(lambda done: self._on_loop(lambda: self._end(request, done, then)))
        return True

    def _all(self, images: tuple[ImageFile, ...]) -> tuple[ImageFile, ...]:
        return tuple(self._whole(one) if one.url else one for one in images)

    def _whole(self, image: ImageFile) -> ImageFile:
        return msgspec.structs.replace(image, data=self._fetch(image.url, f"{image.field}.url"), url="")

    def _end(
        self, request: OpenRequest, done: "Future[tuple[ImageFile, ...]]", then: Callable[[OpenRequest], None]
    ) -> None:
        request.awaits_images = False
        if request.outcome is not None or done.cancelled():
            return
        error = done.exception()
        if error is None:
            request.asked = with_images(request.asked, done.result())
            then(request)
        elif isinstance(error, ServiceError):
            request.end(error)
        else:
            request.end(fault(Role.GATEWAY, about(request.envelope), "failed while fetching an image", error))
