"""The engine's request of a prompt that the tokenizer sent."""

from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.timeline import RequestTimeline
from sluice_server.services.messages.messages import Prompt
from sluice_server.services.messages.work import unpack_ids


def request_of(
    prompt: Prompt, now_s: float, identity: CacheIdentity, timeline: RequestTimeline | None
) -> EngineRequest:
    """Returns the request of a prompt that arrives at `now_s`; `timeline` receives its events if it is traced."""
    envelope, scheduling = prompt.envelope, prompt.scheduling
    return EngineRequest(
        request_id=envelope.request_id,
        prompt_ids=tuple(unpack_ids(prompt.ids)),
        params=prompt.params,
        priority=scheduling.priority,
        ttft_target_s=float("inf") if scheduling.ttft_target_s is None else scheduling.ttft_target_s,
        bypasses_cache=scheduling.bypasses_cache,
        tenant=envelope.tenant,
        arrival_s=now_s,
        deadline_s=float("inf") if envelope.time_left_s is None else now_s + envelope.time_left_s,
        credit=scheduling.credit,
        is_open=scheduling.is_open,
        cache_salt=tenant_root(identity.encoded(), envelope.tenant),
        max_draft_tokens=scheduling.max_draft_tokens,
        timeline=timeline,
        resume_ids=tuple(None if ids is None else tuple(unpack_ids(ids)) for ids in prompt.resume),
        prompt_embeds=prompt.embeds,
        images=prompt.images,
        adapter=prompt.adapter,
    )
