"""Training and sampling with torch on this machine: `tunebook.backends.local.LocalBackend`."""

from tunebook.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
