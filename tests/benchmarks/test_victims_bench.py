"""The benchmark of preemptions: what its bound leaves out are the tokens that are computed again, and no others."""

from benchmarks.scheduled import Cost, Job, Simulated
from benchmarks.victims import AgainIsFree, least_computed
from sluice_server.engine.scheduler.settings import SchedulerSettings


def test_only_tokens_that_are_computed_again_are_free() -> None:
    jobs = [Job(at_s=0.0, num_prompt=64, num_output=200, max_tokens=512) for _ in range(12)]
    cost = AgainIsFree(Cost())
    with least_computed():
        simulated = Simulated(jobs, 40, SchedulerSettings(watermark=-3.0), cost, 12)
        run = simulated.run()
    again = simulated.scheduler.num_recomputed
    assert again > 0 and cost.num_new == run.computed - again == sum(64 + 200 - 1 for _ in jobs)
