"""Log lines: JSON and console, the trace's id in every line about a request, prompts only if enabled."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Detokenize, Generate, TextPrompt, Tokenize, TokenPrompt, Work, pack_ids
from sluice_server.services.telemetry import logs
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.observed import RequestUsage, StartedRequest
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.request_log import RequestLog
from sluice_server.services.telemetry.tracing import Tracer

TRACE = "ab" * 16
ENVELOPE = Envelope("r1", "g", tenant="acme", model="m", traceparent=f"00-{TRACE}-{'cd' * 8}-01")
SECRET = "my private\nprompt"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], _ = before
    root.setLevel(before[1])


def line(capsys: pytest.CaptureFixture[str], form: str, work: Work, *, shows_prompts: bool) -> str:
    logs.configure("info", form, "gateway-0")
    log = RequestLog(is_on=True, shows_prompts=shows_prompts)
    observer = GatewayObserver(Tracer(None), Metrics("gateway", "g"), lambda envelope: None, log)
    observer.request_started(StartedRequest(ENVELOPE, "Generate", work)).ended(
        8, "QUEUE_FULL", RequestUsage(num_prompt=3)
    )
    (shown,) = capsys.readouterr().err.splitlines()
    return shown


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_requests_line_has_its_trace_and_no_prompt(capsys: pytest.CaptureFixture[str], form: str) -> None:
    shown = line(capsys, form, Generate(TextPrompt(SECRET), SamplingParams()), shows_prompts=False)
    assert TRACE in shown and "r1" in shown and "QUEUE_FULL" in shown and "acme" in shown
    assert "private" not in shown and "prompt_tokens" in shown


def test_a_line_that_is_written_later_has_the_time_of_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "gateway-0")
    log = RequestLog(is_on=True, shows_prompts=False)
    deferred: list[Callable[[], object]] = []
    observer = GatewayObserver(Tracer(None), Metrics("gateway", "g"), lambda envelope: None, log, deferred.append)
    started = StartedRequest(ENVELOPE, "Generate", Generate(TextPrompt("x"), SamplingParams()))
    with mock.patch("time.time", return_value=1000.5):
        observer.request_started(started).ended(0, "", RequestUsage())
    assert not capsys.readouterr().err
    (tell,) = deferred
    tell()
    found = json.loads(capsys.readouterr().err)
    assert found["time"] == time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(1000.5))
    assert (found["message"], found["level"], found["request_id"]) == ("Generate ended", "info", "r1")


def test_nothing_waits_where_nothing_is_told() -> None:
    deferred: list[Callable[[], object]] = []
    silent = RequestLog(is_on=False, shows_prompts=False)
    observer = GatewayObserver(Tracer(None), Metrics("gateway", "g"), lambda envelope: None, silent, deferred.append)
    started = StartedRequest(ENVELOPE, "Generate", Generate(TextPrompt("x"), SamplingParams()))
    observer.request_started(started).ended(0, "", RequestUsage())
    assert not deferred


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (Generate(TextPrompt(SECRET), SamplingParams()), SECRET),
        (Tokenize(TokenPrompt(pack_ids([1, 2]))), [1, 2]),
        (Detokenize(pack_ids([3])), [3]),
    ],
)
def test_prompts_are_told_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], work: Work, told: object
) -> None:
    assert json.loads(line(capsys, "json", work, shows_prompts=True))["prompt"] == told


def test_a_failure_in_json_is_one_line_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "engine-0")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("could not %s", "do", extra=logs.about(ENVELOPE))
    found = json.loads(capsys.readouterr().err)
    assert (found["message"], found["trace_id"], found["request_id"]) == ("could not do", TRACE, "r1")
    assert "ValueError: bad" in found["exception"] and found["process"] == "engine-0"
    assert "trace_id" not in logs.about(Envelope("r", "g"))[logs.FIELDS]


def test_lines_in_json_have_their_second_and_whatever_text_there_is() -> None:
    form = logs.JsonFormatter("g")

    def told(created: float, message: str) -> tuple[str, str]:
        record = logging.makeLogRecord({"created": created, "msg": message, "levelname": "INFO", "name": "x"})
        found = json.loads(form.format(record))
        assert found["time"] == time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(created))
        return found["time"], found["message"]

    first, half = told(1000.2, "a"), told(1000.9, "\udcff")
    assert first[0] == half[0] and half[1] == "\udcff"
    assert told(1001.1, "c")[0] != first[0] and told(1000.2, "d")[0] == first[0]
