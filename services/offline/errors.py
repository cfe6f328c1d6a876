"""Errors of one prompt among several."""

from sluice_server.engine.errors import ServiceError, invalid, unsupported
from sluice_server.services.edge.errors import EdgeError


class PromptError(ServiceError):
    """What is wrong with one prompt, or with its parameters.

    Attributes:
        index: of the prompt.
        limit: that was passed, or "" where there is none.
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
        self.limit = error.details.get("limit", "")


def from_edge(error: EdgeError) -> ServiceError:
    """What reading a chat in OpenAI's form found."""
    if error.code == "unsupported_parameter":
        return unsupported(error.param, error.message)
    return invalid(error.param or "messages", error.message.removeprefix(f"{error.param}: "))
