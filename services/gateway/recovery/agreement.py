"""Decides which engines may serve together: those of the service's revision, whose caches have one identity.

Engines of another revision or of other settings would continue a stream with other tokens. Those that have the revision
of the service serve meanwhile. A new revision is adopted once all processes, this one included, serve it: processes
whose files were replaced since they were read start again.
"""

import dataclasses
import logging
from collections.abc import Callable

from sluice_server.engine.errors import other_revision
from sluice_server.engine.request import Limits
from sluice_server.services.gateway.recovery.liveness import Liveness
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import ModelInfo

logger = logging.getLogger(__name__)


class Agreement:
    """What the engines of a ring are compared with.

    Attributes:
        is_mixed: whether processes serve different revisions.
    """

    def __init__(
        self,
        manager: RequestManager,
        liveness: Liveness,
        read_model: Callable[[str], tuple[ModelInfo, Limits] | None],
    ) -> None:
        """`read_model`: see `WatchInputs`."""
        self.is_mixed = False
        self._manager = manager
        self._liveness = liveness
        self._read_model = read_model

    def admits(self, engine: str) -> bool:
        """Whether an engine may serve. A new revision that all processes serve is adopted here."""
        revision = self._liveness.revision
        before = self._manager.settings.model.revision
        found = self._read_model(revision) if revision is not None and revision != before else None
        if found is not None:
            logger.info("requests are of revision %s from now on%s", revision, f"; it was {before}" if before else "")
            self._adopt(*found)
        now = self._manager.settings.model.revision
        self.is_mixed = revision != now
        why = self._why_not(engine, now)
        refused = self._manager.engines.refused
        if why and refused.get(engine) != why:
            logger.warning("%s gets no requests: %s", engine, why)
        refused.pop(engine, None)
        if why:
            refused[engine] = why
        return not why

    def _why_not(self, engine: str, revision: str) -> str:
        if self._liveness.revision_with(engine) != revision:
            return f"the processes serve or read different revisions ({self._liveness.revisions}), and not {revision!r}"
        own = self._liveness.identity_of(engine)
        for other in sorted(self._manager.engines.serving - {engine}):
            if self._liveness.identity_of(other) != own:
                return f"its weights, number formats or kernels are not those of {other}, so that its tokens may differ"
        return ""

    def _adopt(self, model: ModelInfo, limits: Limits) -> None:
        """Serves this model from now on. Open requests of another revision end; those that were opened before one was
        known are of this one."""
        model = dataclasses.replace(model, aliases=self._manager.settings.model.aliases)
        self._manager.settings = dataclasses.replace(self._manager.settings, model=model, limits=limits)
        for request in self._manager.requests:
            if not request.envelope.revision and not request.is_own:
                request.learn_revision(model.revision)
            elif request.envelope.revision != model.revision:
                request.end(other_revision(request.envelope.revision, model.revision))
