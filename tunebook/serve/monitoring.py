"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally

from tunebook.serve.meters import Counter, Gauge, Histogram, prometheus_text
from tunebook.serve.records import ResourceStatus, SessionStatus


class Monitor:
    """The meters of one server."""

    def __init__(self) -> None:
        self.requests = Counter(
            "tunebook_requests_total", "Requests answered.", ("method", "path", "status")
        )
        self.operations = Counter(
            "tunebook_operations_total", "Operations that ended.", ("kind", "status")
        )
        self.operation_s = Histogram(
            "tunebook_operation_seconds", "From submission to end of an operation.", ("kind",)
        )
        self.together = Histogram(
            "tunebook_operations_together",
            "Operations that ran as one batch.",
            bounds=(1, 2, 4, 8, 16, 32, 64),
        )
        self.tokens = Counter("tunebook_tokens_total", "Tokens of completed operations.", ("kind",))
        self._resources = Gauge("tunebook_resources", "Resources by state.", ("status",))
        self._sessions = Gauge("tunebook_sessions", "Live sessions by state.", ("status",))
        self._queued = Gauge("tunebook_operations_queued", "Operations that wait or run.")

    def text(
        self,
        *,
        resources: Tally[ResourceStatus],
        sessions: Tally[SessionStatus],
        num_queued: int,
    ) -> str:
        """All meters in the text format.

        Args:
            resources: live ones by state.
            sessions: live ones by state.
            num_queued: operations that have not ended.
        """
        for status in ResourceStatus:
            self._resources.set(resources[status], status=str(status))
        for status in SessionStatus:
            self._sessions.set(sessions[status], status=str(status))
        self._queued.set(num_queued)
        return prometheus_text(
            [
                self.requests,
                self.operations,
                self.operation_s,
                self.together,
                self.tokens,
                self._resources,
                self._sessions,
                self._queued,
            ]
        )
