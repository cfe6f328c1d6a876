"""The screen of `sluice top`, drawn from two answers of WatchLoad."""

from rich.console import Console, Group
from sluice.v1 import control_pb2

from sluice_server.engine.request import SamplingParams
from sluice_server.services.cli.top import BAR, bar, view
from sluice_server.services.gateway.calls.load import MAX_TENANTS, tenants_of
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Generate, TextPrompt


def shown(group: Group) -> str:
    console = Console(width=140, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(group)
    return captured.get()


def load(hits: int, queries: int, preemptions: int) -> control_pb2.Load:
    made = control_pb2.Load(open_requests=3, max_open_requests=256, reserved_tokens=1200, max_reserved_tokens=9000)
    engine = made.engines.add(engine_id="engine-0", running_requests=2, waiting_requests=1, total_blocks=100)
    engine.free_blocks, engine.tokens_per_second, engine.preemptions = 75, 1234.0, preemptions
    engine.prefix_hit_tokens, engine.prefix_query_tokens = hits, queries
    engine.step_time.FromMilliseconds(4)
    made.tenants.add(tenant="acme", open_requests=2, reserved_tokens=800)
    made.tenants.add(open_requests=1, reserved_tokens=400)
    return made


def test_rates_are_since_the_answer_before() -> None:
    text = shown(view("host:1", load(80, 200, 9), load(30, 100, 5), 2.0))
    for part in (
        "host:1",
        "3/256",
        "1,200 of 9,000",
        "engine-0",
        "25%",
        "50%",
        "4.0",
        "1,234",
        "2.0",
        "acme",
        "others",
    ):
        assert part in text, part
    assert "silent" not in text


def with_ranks(made: control_pb2.Load, *times_ms: tuple[int, int]) -> control_pb2.Load:
    for steps, sums in times_ms:
        rank = made.engines[0].ranks.add()
        rank.step_time.FromMilliseconds(steps)
        rank.sum_time.FromMilliseconds(sums)
    return made


def test_ranks_show_what_they_compute_and_what_they_wait() -> None:
    """Of the time between two answers; of all steps so far in the first one."""
    before, now = (
        with_ranks(load(0, 0, 0), *times) for times in (((5000, 0), (5000, 4000)), ((6500, 500), (6500, 5000)))
    )
    lines = [line for line in shown(view("host:1", now, before, 2.0)).splitlines() if "engine-0 rank" in line]
    assert [line.split()[:3] for line in lines] == [["engine-0", "rank", "0"], ["engine-0", "rank", "1"]]
    assert "50%" in lines[0] and "25%" in lines[0] and "25%" in lines[1] and "50%" in lines[1]
    first = shown(view("host:1", before, None, 2.0))
    assert "100%" in first and "20%" in first and "80%" in first
    assert "rank" not in shown(view("host:1", load(0, 0, 0), None, 1.0)), "an engine of one rank has no such table"


def test_the_first_answer_has_no_rates_and_an_old_report_says_so() -> None:
    stale = load(80, 200, 9)
    stale.engines[0].age.FromSeconds(7)
    text = shown(view("host:1", stale, None, 1.0))
    assert "–" in text and "silent 7 s" in text


def test_a_bar_is_as_full_as_its_share() -> None:
    assert [bar(part, 4).count("█") for part in (0, 1, 4, 9)] == [0, BAR // 4, BAR, BAR]
    assert bar(1, 0).count("█") == 0


def test_tenants_are_summed_most_first_and_bounded() -> None:
    requests = []
    for i in range(MAX_TENANTS + 6):
        for _ in range(2 if i == 3 else 1):
            asked = TranslatedRequest(work=Generate(TextPrompt("x"), SamplingParams()), reserve=10)
            requests.append(OpenRequest(Envelope(f"{i}", "g", tenant=f"t{i:03}"), asked, 0.0))
    requests[0].is_own = True
    found = tenants_of(requests)
    assert len(found) == MAX_TENANTS and (found[0].tenant, found[0].open_requests) == ("t003", 2)
    assert found[-1].tenant == "" and sum(one.open_requests for one in found) == len(requests) - 1
    assert sum(one.reserved_tokens for one in found) == 10 * (len(requests) - 1)
