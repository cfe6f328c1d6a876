"""Measures step times and throughput, from the clock readings that `plan` and `apply` are given."""

import dataclasses

from sluice_server.engine.scheduler.histogram import Histogram

STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STEP_TOKENS = tuple(float(1 << i) for i in range(15))


@dataclasses.dataclass(slots=True)
class StepRates:
    """Totals since start, and means that decay over about twenty steps."""

    num_steps: int = 0
    mean_step_s: float = 0.0
    tokens_per_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    step_times: Histogram = dataclasses.field(default_factory=lambda: Histogram(STEP_S))
    step_tokens: Histogram = dataclasses.field(default_factory=lambda: Histogram(STEP_TOKENS))
    _mean_tokens: float = 0.0
    _variance: float = 0.0  # of a step's tokens
    _covariance: float = 0.0  # of a step's tokens with its seconds

    def record(self, seconds: float, num_tokens: int) -> None:
        """Adds one step."""
        weight = 1.0 if self.num_steps == 0 else 0.05
        self.num_steps += 1
        self.total_s += seconds
        self.num_tokens += num_tokens
        self.step_times.observe(seconds)
        self.step_tokens.observe(num_tokens)
        more, longer = num_tokens - self._mean_tokens, seconds - self.mean_step_s
        self._mean_tokens += weight * more
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)
        self.mean_step_s += weight * (seconds - self.mean_step_s)
        self.tokens_per_s += weight * (num_tokens / max(seconds, 1e-9) - self.tokens_per_s)

    @property
    def token_s(self) -> float:
        """Seconds that one more token in a step takes: the slope of seconds over tokens; 0 for steps of equal size."""
        return max(0.0, self._covariance / self._variance) if self._variance > 0 else 0.0

    def time_for(self, num_prompt: int, num_steps: float) -> float:
        """Returns the seconds for `num_prompt` tokens of prefill and `num_steps` steps; 0 before the first step."""
        return num_prompt * self.token_s + num_steps * self.mean_step_s
