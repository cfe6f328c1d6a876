"""Defines the error of one prompt in a batch."""

from sluice_server.engine.errors import ServiceError, invalid, unsupported
from sluice_server.services.edge.errors import EdgeError


class PromptError(ServiceError):
    """An error in one prompt or its parameters.

    Attributes:
        index: the prompt's place in the batch.
        error: the error without its place.
        limit: the limit that was exceeded, or "".
    """

    def __init__(self, index: int, error: ServiceError) -> None:
        super().__init__(
            error.code,
            error.reason,
            f"prompts[{index}]: {error.message}",
            field=error.field,
            details=error.details,
            retry_after_s=error.retry_after_s,
        )
        self.index = index
        self.error = error
        self.limit = error.details.get("limit", "")


def from_edge(error: EdgeError) -> ServiceError:
    """Converts an error from reading a chat in OpenAI's form."""
    if error.code == "unsupported_parameter":
        return unsupported(error.param, error.message)
    return invalid(error.param or "messages", error.message.removeprefix(f"{error.param}: "))
