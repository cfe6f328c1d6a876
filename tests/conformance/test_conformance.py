"""The behaviour that every SDK must have, one test per case; README.md has the contract of the drivers."""

import contextlib
import signal

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2

from tests.conformance.conftest import MODEL, PROMPT, Secured
from tests.conformance.driver import asking, told
from tests.conformance.proxy import cutting, holding
from tests.conformance.sdks import Sdk
from tests.system.service import Service, generate, serve, spec, wait_until

WHOLE = {"text": PROMPT, "max_tokens": 200}
MANY_BYTES = 3000  # of HTTP/2 from the server: in the midst of 200 tokens


def num_open(service: Service) -> int:
    """The number of requests open at the engine, over all gateways."""
    with service.control() as control:
        engines = control.GetLoad(control_pb2.GetLoadRequest(), timeout=60).load.engines
        return sum(one.running_requests + one.waiting_requests for one in engines)


def cancel(service: Service, generation_id: str) -> bool:
    """Cancels a generation by its id, from another client; returns whether it still ran."""
    with service.stub() as stub:
        request = inference_pb2.CancelGenerationRequest(generation_id=generation_id)
        found = stub.CancelGeneration(request, timeout=60).found
    return bool(found == inference_pb2.GENERATION_STATE_RUNNING)


def test_unary(sdk: Sdk, service: Service, expected: str) -> None:
    end = told(sdk, service.address, call="generate", **WHOLE)
    assert (end["text"], end["finish_reason"], end["completion_tokens"]) == (expected, "length", 200)
    assert end["error"] is None and len(end["token_ids"]) == 200


def test_stream(sdk: Sdk, service: Service, expected: str) -> None:
    end = told(sdk, service.address, call="stream", **WHOLE)
    assert (end["text"], end["finish_reason"], end["completion_tokens"]) == (expected, "length", 200)
    assert end["error"] is None and end["seqs_rise"] and len(end["token_ids"]) == 200 and end["num_broken"] == 0


def test_converse(sdk: Sdk, service: Service, expected: str) -> None:
    with asking(sdk, service.address, call="converse", count=3, window=8, **WHOLE) as driver:
        for end in driver.all_ends():
            assert (end["text"], end["completion_tokens"], end["error"]) == (expected, 200, None)
            assert end["seqs_rise"]


@pytest.mark.parametrize("call", ["stream", "converse"])
def test_cancel_mid_write(sdk: Sdk, service: Service, call: str) -> None:
    end = told(sdk, service.address, call=call, text=PROMPT, max_tokens=1800, cancel_after=3)
    assert end["error"]["code"] == "CANCELLED" and end["finish_reason"] == "" and end["num_deltas"] >= 3
    wait_until(lambda: num_open(service) == 0, 60, "the engine goes on with what was cancelled")


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_deadline(sdk: Sdk, service: Service, call: str) -> None:
    with holding(service.address, 0) as proxy:
        end = told(sdk, proxy.address, call=call, text=PROMPT, max_tokens=4, timeout_s=1.0)
        assert end["error"]["code"] == "DEADLINE_EXCEEDED" and proxy.harmed.is_set()


def test_slow_reader(sdk: Sdk, service: Service) -> None:
    with asking(sdk, service.address, call="converse", window=16, pause_after=1, **WHOLE) as driver:
        generation_id = driver.paused()
        wait_until(lambda: num_open(service) == 0, 60, "the engine computes for a reader that does not read")
        cancel(service, generation_id)
        driver.go_on()
        end = driver.end()
    assert end["error"]["code"] == "CANCELLED" and end["completion_tokens"] <= 16 + 8


def test_credit_exactness(sdk: Sdk, service: Service) -> None:
    end = told(sdk, service.address, call="converse", window=16, grants=[8, 3], **WHOLE)
    assert end["error"]["code"] == "CANCELLED"
    assert len(end["token_ids"]) == end["completion_tokens"] == 27


@pytest.mark.parametrize("call", ["stream", "converse"])
def test_rich_error_mid_stream(sdk: Sdk, service: Service, call: str) -> None:
    for _ in range(5):  # on a busy machine another client may take longer than all tokens do
        with asking(sdk, service.address, call=call, text=PROMPT, max_tokens=1800, pause_after=2) as driver:
            generation_id = driver.paused()
            is_cut = cancel(service, generation_id)
            driver.go_on()
            end = driver.end()
        if is_cut:
            break
    error = end["error"]
    assert (error["code"], error["reason"], error["generation_id"]) == ("CANCELLED", "CLIENT_CANCELLED", generation_id)
    assert error["last_seq"] >= 2 and end["completion_tokens"] >= 2


def test_fields_at_fault(sdk: Sdk, service: Service) -> None:
    for call in ("generate", "stream", "converse"):
        error = told(sdk, service.address, call=call, text=PROMPT, max_tokens=10**6)["error"]
        assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "INVALID_PARAMETER")
        assert error["fields"] == ["max_tokens"] and "1000000" in error["message"]


def test_prompt_over_4_mib(sdk: Sdk, service: Service) -> None:
    """The prompt arrives, and is refused by the server's own limit, not by a transport's."""
    error = told(sdk, service.address, call="stream", text="word ", repeat=1 << 20)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "INVALID_PARAMETER")
    assert error["fields"] == ["prompt"] and str(5 << 20) in error["message"].replace(",", "")


def test_unicode_split_over_tokens(sdk: Sdk, service: Service) -> None:
    text = "naïve 🌊 日本語 🏳️‍🌈 𝕊"
    for call in ("generate", "stream", "converse"):
        end = told(sdk, service.address, call=call, text=PROMPT, choices=[text])
        assert (end["text"], end["error"]) == (text, None) and len(end["token_ids"]) > len(text)
    # Token by token, as deltas that wait are told together: then some of them have no text.
    end = told(sdk, service.address, call="converse", text=PROMPT, choices=[text], window=1, grants=[1] * 200)
    assert (end["text"], end["error"]) == (text, None) and end["num_empty"] > 0


@pytest.mark.parametrize("call", ["stream", "converse"])
def test_resume_after_a_cut_connection(sdk: Sdk, service: Service, expected: str, call: str) -> None:
    with cutting(service.address, MANY_BYTES, num=2) as proxy:
        end = told(sdk, proxy.address, call=call, **WHOLE)
    assert (end["text"], end["error"], end["seqs_rise"]) == (expected, None, True)
    assert len(end["token_ids"]) == 200 and end["num_broken"] >= 1


def test_without_retries_a_cut_connection_is_an_error(sdk: Sdk, service: Service) -> None:
    with cutting(service.address, MANY_BYTES) as proxy:
        end = told(sdk, proxy.address, "--no-retry", call="stream", **WHOLE)
    assert end["error"]["code"] == "UNAVAILABLE" and end["num_broken"] == 0


def test_drain(sdk: Sdk, expected: str) -> None:
    with serve(*MODEL) as service:
        with asking(sdk, service.address, call="stream", pause_after=2, **WHOLE) as driver:
            driver.paused()
            with service.control() as control, contextlib.closing(Draining(control)) as draining:
                draining.begun()
                error = told(sdk, service.address, "--no-retry", call="stream", **WHOLE)["error"]
                assert (error["code"], error["reason"]) == ("UNAVAILABLE", "DRAINING") and error["retry_after_s"] > 0
                driver.go_on()
                end = driver.end()
        assert (end["text"], end["error"], end["num_broken"]) == (expected, None, 0)


class Draining:
    """A call of Drain."""

    def __init__(self, control: object) -> None:
        from sluice.v1 import control_pb2_grpc

        assert isinstance(control, control_pb2_grpc.ControlServiceStub)
        self._call = control.Drain(control_pb2.DrainRequest(), timeout=60)

    def begun(self) -> None:
        """Waits until the drain has begun."""
        next(self._call)

    def close(self) -> None:
        """Stop listening."""
        self._call.cancel()


def test_tls(sdk: Sdk, keyed: Secured) -> None:
    reach = ("--token", "k")
    end = told(sdk, keyed.address, *reach, "--tls-ca", keyed.ca, call="generate", text=PROMPT, max_tokens=4)
    assert (end["error"], end["completion_tokens"]) == (None, 4)
    wrong = told(sdk, keyed.address, *reach, "--tls-ca", keyed.other_ca, "--no-retry", call="generate", text=PROMPT)
    assert wrong["error"]["code"] == "UNAVAILABLE"


def test_mtls(sdk: Sdk, mutual: Secured) -> None:
    reach = ("--tls-ca", mutual.ca)
    shown = ("--tls-cert", mutual.certificate, "--tls-key", mutual.key)
    end = told(sdk, mutual.address, *reach, *shown, call="stream", text=PROMPT, max_tokens=4)
    assert (end["error"], end["completion_tokens"]) == (None, 4)
    assert told(sdk, mutual.address, *reach, "--no-retry", call="stream", text=PROMPT)["error"]["code"] == "UNAVAILABLE"


def test_bad_token(sdk: Sdk, keyed: Secured) -> None:
    for call in ("generate", "stream", "converse"):
        error = told(sdk, keyed.address, "--token", "x", "--tls-ca", keyed.ca, call=call, text=PROMPT)["error"]
        assert (error["code"], error["reason"]) == ("UNAUTHENTICATED", "CREDENTIALS_INVALID")


@pytest.mark.parametrize("call", ["stream", "converse"])
def test_gateway_killed(sdk: Sdk, service: Service, expected: str, call: str) -> None:
    with holding(service.address, MANY_BYTES) as proxy, asking(sdk, proxy.address, call=call, **WHOLE) as driver:
        assert proxy.harmed.wait(60)
        gateways = [child for name, child in service.children().items() if "gateway" in name]
        assert len(gateways) == 2
        for gateway in gateways:
            gateway.send_signal(signal.SIGKILL)
        proxy.release()
        end = driver.end()
    assert (end["text"], end["error"], end["seqs_rise"]) == (expected, None, True)
    assert end["num_broken"] >= 1


@pytest.mark.parametrize("call", ["stream", "converse"])
def test_cell_killed(sdk: Sdk, service: Service, call: str) -> None:
    """Generations over two services, one of which is killed as a whole: each goes on at the other, token for token."""
    num = 600
    with service.stub() as stub:
        expected = generate(stub, spec(PROMPT, num)).text
    with serve(*MODEL, "--grace-s", "1") as lost:
        both, count = f"{lost.address},{service.address}", 1 if call == "converse" else 6
        driving = [asking(sdk, both, call=call, text=PROMPT, max_tokens=num, count=count) for _ in range(6 // count)]
        with contextlib.ExitStack() as stack:
            drivers = [stack.enter_context(one) for one in driving]
            wait_until(lambda: lost.num_running() > 0, 60, "no generation went to the service that is to be killed")
            children = lost.children().values()
            lost.process.kill()
            for child in children:
                child.kill()
            ends = [end for driver in drivers for end in driver.all_ends()]
    assert [(end["text"], end["error"], end["seqs_rise"]) for end in ends] == [(expected, None, True)] * 6
    assert sum(end["num_broken"] for end in ends) >= 1


def test_no_server(sdk: Sdk) -> None:
    assert told(sdk, "127.0.0.1:1", call="generate", text=PROMPT)["error"]["code"] == grpc.StatusCode.UNAVAILABLE.name
