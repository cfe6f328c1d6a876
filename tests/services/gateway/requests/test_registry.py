"""The registry of open requests, and how earlier ones ended."""

from sluice_server.engine.errors import stage_lost
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Detokenize


def opened(name: str) -> OpenRequest:
    return OpenRequest(Envelope(request_id=name, origin="g"), TranslatedRequest(Detokenize(b"")), 0.0)


def test_how_requests_ended_is_remembered_for_a_while() -> None:
    table, request = OpenRequests(num_remembered=2), opened("r")
    table.add(request)
    assert table.state("r", "") is RequestStatus.RUNNING and table.state("r", "another") is None
    request.end(stage_lost("engine"))
    assert table.remove(request) and not table.remove(request)
    assert table.state("r", "") is RequestStatus.FAILED
    for name in ("a", "b"):
        other = opened(name)
        table.add(other)
        table.remove(other)
    assert table.state("r", "") is None
