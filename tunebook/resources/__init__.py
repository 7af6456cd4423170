"""What may bill on a service: written down before it exists, stopped on every way out."""

from tunebook.resources.ledger import Entry, Ledger
from tunebook.resources.live import (
    CreatingService,
    LiveResource,
    ReplyLost,
    ResourceService,
    ServiceError,
    StillInUse,
    service_of,
)
from tunebook.resources.owning import owned_resource
from tunebook.resources.watchdog import Patience, watch

__all__ = [
    "CreatingService",
    "Entry",
    "Ledger",
    "LiveResource",
    "Patience",
    "ReplyLost",
    "ResourceService",
    "ServiceError",
    "StillInUse",
    "owned_resource",
    "service_of",
    "watch",
]
