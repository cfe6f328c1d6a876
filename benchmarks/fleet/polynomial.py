"""The seconds of a step as the mock engine of Dynamo reckons them by default, so that both simulate the same device.

Dynamo 1.6.1 (`aisimulate-core` 0.13, Apache-2.0) states two polynomials, for the prompt tokens of a step and for the
tokens of the cache that its decodes attend to, and adds them.
"""

import dataclasses

from sluice_server.engine.plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class PolynomialCost:
    """Implements `engine.Cost`. `cache_tokens`: what an engine's cache holds."""

    cache_tokens: int
    kv_bytes: int = 1 << 17
    token_s: float = 1.518344e-5

    def __call__(self, plan: StepPlan) -> float:
        """Implements `engine.Cost.__call__`."""
        num_prompt = num_active = 0
        for num, start in zip(plan.query_lens, plan.starts, strict=True):
            if num > 1:
                num_prompt += num
            else:
                num_active += start + 1
        prompt_ms = 4.209989e-07 * num_prompt**2 + 1.518344e-02 * num_prompt + 16.50142 if num_prompt else 0.0
        share = min(1.0, num_active / self.cache_tokens)
        decode_ms = max(1.0, -25.74 * share**2 + 54.01 * share + 5.74) if num_active else 0.0
        return (prompt_ms + decode_ms) / 1e3

    def draft_s(self, num_drafts: int) -> float:
        """Implements `engine.Cost.draft_s`: it has no drafts."""
        raise NotImplementedError
