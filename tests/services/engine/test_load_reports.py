"""What an engine's stage reports of itself, and how often."""

from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.engine.load_reports import INTERVAL_S
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import EngineRole, Report
from tests.services.engine.test_engine_stage import LIMITS, prompt, run
from tests.services.test_stage_attempts import Nines, unrecorded


class Rig:
    """A stage whose clock is told, and its reports."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reports: list[Report] = []
        place = RingMembership("engine-0", 7, clock=lambda: self.now_s, role=EngineRole.PREFILL)
        engine = Engine(Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40), Nines())
        self.stage = EngineStage(engine, place, self._emit, unrecorded, Computing(threads=3))

    def _emit(self, message: Message) -> None:
        if isinstance(message, Report):
            self.reports.append(message)


def test_a_report_is_sent_with_the_first_turn_and_then_once_per_interval() -> None:
    rig = Rig()
    for now_s in (100.0, 100.0, 100.0 + 0.9 * INTERVAL_S, 100.0 + INTERVAL_S, 100.0 + 1.9 * INTERVAL_S):
        rig.now_s = now_s
        rig.stage.turn()
    assert len(rig.reports) == 2


def test_a_report_says_who_the_engine_is_and_what_was_set_last() -> None:
    rig = Rig()
    rig.stage.turn()
    rig.stage.reports.computing = Computing(threads=2)
    rig.stage.reports.memory_level, rig.stage.reports.fetch_s = lambda: 1, lambda: 0.5
    rig.now_s += INTERVAL_S
    rig.stage.turn()
    first, second = rig.reports
    assert {(one.engine_id, one.epoch, one.role) for one in rig.reports} == {("engine-0", 7, EngineRole.PREFILL)}
    assert [one.computing.threads for one in rig.reports] == [3, 2]
    assert [(one.memory_level, one.fetch_s) for one in rig.reports] == [(0, 0.0), (1, 0.5)]
    assert first.load.num_blocks == second.load.num_blocks == 40


def test_a_report_says_whether_the_engine_has_sampled_a_token() -> None:
    rig = Rig()
    rig.stage.turn()
    rig.stage.handle(prompt())
    run(rig.stage)
    rig.now_s += INTERVAL_S
    rig.stage.turn()
    assert [one.served_token for one in rig.reports] == [False, True]
