"""What ModelStatistics counts: generations that ended, with the time of their phases."""

import itertools

from sluice_server.engine.errors import invalid
from sluice_server.engine.request import SamplingParams
from sluice_server.services.gateway.oip.statistics import GenerationCounts
from sluice_server.services.messages.details import Timings
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Detokenize, Generate, TextPrompt, Work
from sluice_server.services.telemetry.observed import RefusedRequest, RequestUsage, StartedRequest, Unobserved


def started(work: Work) -> StartedRequest:
    return StartedRequest(Envelope("r", "g0", "t"), "Generate", work)


def test_each_end_counts_and_phases_those_of_a_success() -> None:
    seconds = itertools.count(10.0, 0.5)  # each look at the clock is half a second later
    counts = GenerationCounts(Unobserved(), lambda: next(seconds), lambda: 7.5)
    work = Generate(TextPrompt("hi"), SamplingParams())
    used = RequestUsage(timings=Timings(0.1, 0.2, 0.25, 0.5, 0.05))
    counts.request_started(started(work)).ended(0, "", used)
    counts.request_started(started(work)).ended(13, "ENGINE_FAULT", used)
    counts.request_started(started(Detokenize(b""))).ended(0, "", RequestUsage())  # generates nothing
    counts.refused(RefusedRequest("Generate", invalid("prompt", "is empty")))
    found = counts.statistics("toy", "1")
    assert (found.name, found.version, found.last_inference) == ("toy", "1", 7500)
    assert (found.inference_count, found.execution_count) == (1, 1)
    stats = found.inference_stats
    totals = [stats.success, stats.fail, stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output]
    assert [(one.count, one.ns) for one in totals] == [
        *((1, 500_000_000), (1, 500_000_000), (1, 200_000_000)),
        *((1, 100_000_000), (1, 750_000_000), (1, 50_000_000)),
    ]


def test_other_names_are_of_the_answer_alone() -> None:
    counts = GenerationCounts(Unobserved())
    counts.statistics("a", "1").inference_count = 5
    assert counts.statistics("b", "1").inference_count == 0
