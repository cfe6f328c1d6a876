"""How many tokens one request may have: what its client has granted so far. Pure."""


class GrantedCredit:
    """`allowed`: tokens that may be sampled in all; None is without limit."""

    def __init__(self, allowed: int | None = None) -> None:
        self.allowed = allowed

    def is_spent(self, num_tokens: int) -> bool:
        """Whether every token that is allowed has come, when `num_tokens` have."""
        return self.allowed is not None and num_tokens >= self.allowed

    def unused(self, num_tokens: int) -> int | None:
        """Tokens that may still come; None is without limit."""
        return None if self.allowed is None else self.allowed - num_tokens

    def grant(self, num_tokens: int) -> None:
        """Allow so many more; without a limit that changes nothing."""
        if self.allowed is not None:
            self.allowed += num_tokens
