"""Random requests of every kind for the scheduler's simulation."""

import dataclasses
import random
from typing import Any

from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.request import AdapterRef, EngineRequest, Pooling, SamplingParams
from tests.engine.scheduler.fake_model import VOCAB, sample
from tests.engine.scheduler.ledger import EOS


class RandomRequests:
    """Makes one request after the other, often with a prefix of earlier ones.

    num_made: how many there were.
    """

    def __init__(self, rng: random.Random) -> None:
        self.num_made = 0
        self._rng = rng

    def make(self, now_s: float, adapter: AdapterRef | None = None) -> EngineRequest:
        """Returns a request that arrives now, for an adapter unless it is pooled."""
        rng = self._rng
        self.num_made += 1
        prefix = [rng.choice((1, 2)) for _ in range(rng.choice((0, 4, 9, 16)))]
        prompt = tuple(prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))])
        params = SamplingParams(max_tokens=rng.randrange(1, 40), seed=rng.randrange(3), ignore_eos=rng.random() < 0.5)
        params = dataclasses.replace(params, **self._outputs())
        tenant = rng.choice("ab")
        extra = self._extras(prompt, params) if rng.random() < 0.3 else {}
        if not extra and params.num_sequences == 1 and rng.random() < 0.2:
            extra["pooling"] = rng.choice((Pooling.LAST, Pooling.MEAN))
        adapter = None if "pooling" in extra else adapter
        return EngineRequest(
            request_id=f"{self.num_made:032x}",
            prompt_ids=prompt,
            params=params,
            priority=rng.choice((0, 0, 5)),
            arrival_s=now_s,
            deadline_s=now_s + rng.randrange(1, 80) if rng.random() < 0.1 else float("inf"),
            cache_salt=tenant_root(adapter.digest if adapter else b"", tenant),
            bypasses_cache=rng.random() < 0.05,
            tenant=tenant,
            max_draft_tokens=rng.choice((None, None, 0, 2)),
            adapter=adapter,
            **extra,
        )

    def _outputs(self) -> dict[str, Any]:
        """The number of outputs and the kind of search."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.7:
            return {}
        if kind < 0.85:
            return {"n": rng.randrange(2, 4)}
        if kind < 0.92:
            return {"n": 1, "best_of": rng.randrange(2, 4)}
        return {"n": 2, "beam_width": rng.randrange(2, 5), "early_stopping": rng.random() < 0.5}

    def _extras(self, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Any]:
        """Credit, open input, or a prefix that was received earlier."""
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0 and not params.is_search:
            return {"credit": rng.randrange(5)}
        if kind == 1 and not params.is_search:
            return {"is_open": True}
        if kind == 2 and not params.is_search:
            return {"resume_ids": self._received(prompt, params)}
        return {}

    def _received(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...] | None, ...]:
        """Tokens that the client may have received before its engine died."""
        rng = self._rng
        outputs: list[tuple[int, ...] | None] = []
        for index in range(params.n):
            ids = sample(prompt, params, index, EOS)
            outputs.append(tuple(ids[: rng.randrange(len(ids) + 1)]) if index == 0 or rng.random() < 0.7 else None)
        return tuple(outputs)
