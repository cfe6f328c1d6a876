"""Limits how much may be open at once: a count of requests and a budget of tokens. Pure."""

from sluice_server.engine.errors import Code, ServiceError, queue_full

BYTES_PER_TOKEN = 4  # typical of English text; an estimate, exact counts come later


class RequestLimiter:
    """Counts open requests, reserved tokens and bytes of images. A single request is always admitted: the engine
    refuses one that can never fit."""

    def __init__(self, max_requests: int, max_tokens: int, max_image_bytes: int = 1 << 62) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.max_image_bytes = max_image_bytes
        self.num_requests = 0
        self.num_tokens = 0
        self.num_image_bytes = 0

    def reserve(self, num_tokens: int, image_bytes: int = 0) -> None:
        """Counts one request, `num_tokens` and `image_bytes`. Raises `ServiceError` QUEUE_FULL with a time to retry."""
        if self.num_requests >= self.max_requests:
            raise queue_full(self.num_requests, self.max_requests)
        if self.num_requests and self.num_tokens + num_tokens > self.max_tokens:
            raise _budget_full(self.num_requests, self.num_tokens, num_tokens, self.max_tokens)
        if image_bytes and self.num_image_bytes and self.num_image_bytes + image_bytes > self.max_image_bytes:
            raise _images_full(self.num_image_bytes, image_bytes, self.max_image_bytes)
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.num_image_bytes += image_bytes

    def grow(self, num_tokens: int) -> None:
        """Reserves `num_tokens` more for an open request. Raises `ServiceError` QUEUE_FULL."""
        if self.num_requests > 1 and self.num_tokens + num_tokens > self.max_tokens:
            raise _budget_full(self.num_requests, self.num_tokens, num_tokens, self.max_tokens)
        self.num_tokens += num_tokens

    def release(self, num_tokens: int, image_bytes: int = 0) -> None:
        """Releases what `reserve` and `grow` took for one request."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        self.num_image_bytes -= image_bytes


def _images_full(held: int, wanted: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"open requests hold {held} bytes of images and this one has {wanted}; this server admits {limit} "
        "(--max-open-image-bytes): try again later or send smaller images",
        details={"limit": str(limit), "actual": str(held + wanted)},
        retry_after_s=1.0,
    )


def _budget_full(depth: int, reserved: int, wanted: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{depth} open requests hold {reserved} tokens and this one needs {wanted}; this server admits {limit}: "
        "try again later or lower max_tokens",
        details={"queue_depth": str(depth), "limit": str(limit), "actual": str(reserved + wanted)},
        retry_after_s=1.0,
    )
