"""The credit of one request: tokens that its client has granted so far. Pure."""


class GrantedCredit:
    """The credit of one request. `allowed`: tokens that may be sampled in all; None means no limit."""

    def __init__(self, allowed: int | None = None) -> None:
        self.allowed = allowed

    def is_spent(self, num_tokens: int) -> bool:
        """Whether `num_tokens` received tokens use up the credit."""
        return self.allowed is not None and num_tokens >= self.allowed

    def unused(self, num_tokens: int) -> int | None:
        """Returns the tokens that may still come after `num_tokens`; None means no limit."""
        return None if self.allowed is None else self.allowed - num_tokens

    def grant(self, num_tokens: int) -> None:
        """Adds `num_tokens` to the credit; has no effect without a limit."""
        if self.allowed is not None:
            self.allowed += num_tokens
