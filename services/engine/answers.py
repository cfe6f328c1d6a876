"""Converts the engine's results to ring records: load, admission, times, log probabilities, prompt scores. Pure."""

from collections.abc import Sequence

from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.parallel.device_group import DeviceGroupRunner
from sluice_server.engine.parallel.group import GroupRunner
from sluice_server.engine.parallel.launches import RankTimes
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.scheduler.events import AdmissionReport, RequestTimes, Sampled
from sluice_server.services.messages.details import Admitted, Load, PromptScores, RankLoad, Timings, TokenLogprobs
from sluice_server.services.messages.messages import Prompt


def load_of(engine: Engine) -> Load:
    """Returns the engine's load as a ring record."""
    scheduler = engine.scheduler
    cache, stats = scheduler.cache, scheduler.cache.stats
    return Load(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_blocks=cache.num_blocks,
        num_free_blocks=cache.num_free,
        block_size=cache.block_size,
        step_s=engine.stats.mean_step_s,
        tokens_per_s=engine.stats.tokens_per_s,
        num_preemptions=scheduler.num_preemptions,
        prefix_hit_tokens=stats.hit_tokens,
        prefix_query_tokens=stats.query_tokens,
        token_s=engine.stats.token_s,
        ranks=tuple(RankLoad(one.compute_s, one.sums_s) for one in rank_times(engine.runner)),
    )


def rank_times(runner: StepRunner) -> Sequence[RankTimes]:
    """Returns the times of each rank of a group since it started; nothing for an engine of one rank."""
    return runner.launches.times if isinstance(runner, GroupRunner | DeviceGroupRunner) else ()


def last_times(runner: StepRunner) -> Sequence[RankTimes]:
    """Returns `rank_times` of the latest step alone."""
    return runner.launches.last if isinstance(runner, GroupRunner | DeviceGroupRunner) else ()


def admitted_of(prompt: Prompt, found: AdmissionReport, output_index: int) -> Admitted:
    """Returns what the engine found when it accepted a request, for the first message of an output."""
    resumed = (prompt.resume[output_index] if prompt.resume else None) or b""
    num_image = sum(image.num_tokens for image in prompt.images)
    limits = found.num_prompt, found.num_cached, found.max_tokens
    return Admitted(*limits, prompt.stops, prompt.text, resumed, num_image, prompt.routed)


def timings_of(prompt: Prompt, times: RequestTimes) -> Timings:
    """Returns the times of an output that finished, for its last message."""
    measured = times.queue_s, times.prefill_s, times.decode_s
    return Timings(prompt.tokenize_s, *measured, num_preemptions=times.num_preemptions)


def logprobs_of(found: TokenLogprob) -> TokenLogprobs:
    """Returns the log probabilities of one token as a ring record."""
    asked = found.asked_ids, found.asked_logprobs, found.asked_ranks
    return TokenLogprobs(found.logprob, found.rank, found.top_ids, found.top_logprobs, *asked)


def scores_of(prompt: Prompt, sampled: Sampled) -> PromptScores | None:
    """Returns the prompt's scores, which come with a request's first message; None if they were not requested."""
    if sampled.admission is None or sampled.admission.prompt_scores is None:
        return None
    return PromptScores(prompt.ids, tuple(logprobs_of(one) for one in sampled.admission.prompt_scores))
