"""Polls a service's health and notes since when it serves, or does not serve."""

import collections
import contextlib
import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

POLL_S = 0.02
ANSWERS_WITHIN_S = 2.0  # a gateway that takes longer counts as not serving


class HealthWatch(threading.Thread):
    """Polls the service's health, and notes its changes."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.changes: collections.deque[tuple[float, bool]] = collections.deque([(0.0, True)])
        self._address = address

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                serving = False  # also while no gateway answers
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWERS_WITHIN_S)
                    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                if serving is not self.changes[-1][1]:
                    self.changes.append((time.monotonic(), serving))
                time.sleep(POLL_S)

    def after(self, at_s: float, serving: bool) -> float | None:
        """Seconds from `at_s` until health was so for the first time; None if it never was."""
        return next((when - at_s for when, what in tuple(self.changes) if what is serving and when >= at_s), None)

    def lost_and_found(self, at_s: float, within_s: float) -> tuple[float, float]:
        """Waits until health was lost and regained after `at_s`: seconds to each, `within_s` if it never was."""
        end = time.monotonic() + within_s
        while True:
            lost = self.after(at_s, serving=False)
            found = None if lost is None else self.after(at_s + lost, serving=True)
            if lost is not None and found is not None:
                return lost, lost + found
            if time.monotonic() > end:
                return within_s if lost is None else lost, within_s
            time.sleep(POLL_S)
