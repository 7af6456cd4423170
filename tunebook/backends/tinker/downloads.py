"""Downloads an adapter from the addresses that the service gives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tunebook.backends.remote.export import ADAPTER_CONFIG, alpha_of
from tunebook.errors import BackendError
from tunebook.resources import ServiceError
from tunebook.runs.redaction import redact

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
TIMEOUT_S = 60.0


def download_adapter(urls: Mapping[str, str], directory: Path) -> float | None:
    """The alpha of the adapter, whose files are then in the folder; None = it names none.

    Args:
        urls: relative path -> address, which is the permission too.
        directory: an empty folder.

    Raises:
        BackendError: it is no PEFT adapter.
        ServiceError: a file does not come.
    """
    import httpx

    if CONFIG not in urls or WEIGHTS not in urls:
        raise BackendError(
            f"the service gave {', '.join(sorted(urls)) or 'no files'} for the export, which is no "
            f"PEFT adapter: that has {CONFIG} and {WEIGHTS}"
        )
    with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
        for name, url in urls.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise BackendError(f"the service named a file outside of the export: {name!r}")
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with client.stream("GET", url) as answer, target.open("wb") as file:
                    answer.raise_for_status()
                    for part in answer.iter_bytes():
                        file.write(part)
            except httpx.HTTPError as error:
                # The address holds the permission, so the message of httpx is not shown whole.
                status = getattr(getattr(error, "response", None), "status_code", None)
                reason = f"HTTP {status}" if status else redact(type(error).__name__, os.environ)
                raise ServiceError(f"download of {name} failed: {reason}") from None
    return alpha_of(directory)
