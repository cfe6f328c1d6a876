"""How fast steps go: running figures from the clock readings that `plan` and `apply` are given."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Pace:
    """Figures since start; the means decay over about twenty steps."""

    num_steps: int = 0
    mean_step_s: float = 0.0
    tokens_per_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0

    def record(self, seconds: float, num_tokens: int) -> None:
        """Take one step into account."""
        weight = 1.0 if self.num_steps == 0 else 0.05
        self.num_steps += 1
        self.total_s += seconds
        self.num_tokens += num_tokens
        self.mean_step_s += weight * (seconds - self.mean_step_s)
        self.tokens_per_s += weight * (num_tokens / max(seconds, 1e-9) - self.tokens_per_s)

    def time_for(self, num_computed: int, num_steps: float) -> float:
        """Seconds for `num_computed` tokens of prefill at the present rate, then `num_steps` steps."""
        if self.num_steps == 0:
            return 0.0  # nothing measured: nothing is refused for it
        return num_computed / max(self.tokens_per_s, 1e-9) + num_steps * self.mean_step_s
