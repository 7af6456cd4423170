"""The service's package, of whose name there are others."""

from __future__ import annotations

from typing import Any

from tunebook.errors import ConfigError

NEEDED = (0, 38)
"""The first release with the interface that is used here."""
HINT = (
    "`pip install 'tunebook[tinker]'` in an environment without together[tinker] and "
    "baseten-loops[tinker], which bring another package of this name"
)


def sdk() -> Any:
    """The service's package.

    Raises:
        ConfigError: it is not there, or another package of its name is.
    """
    try:
        import tinker
    except ImportError as error:
        raise ConfigError(f"backend=tinker needs the package tinker; {HINT}") from error
    found = _version()
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < NEEDED:
        raise ConfigError(
            f"backend=tinker needs tinker {'.'.join(map(str, NEEDED))} or newer, and this "
            f"environment has {found or 'another package of this name'}; {HINT}"
        )
    return tinker


def _version() -> str | None:
    """Of the service's package; None = it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tinker")
    except PackageNotFoundError:
        return None
