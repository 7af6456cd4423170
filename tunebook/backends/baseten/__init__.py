"""Baseten Loops, a service whose runs train one adapter each."""

from tunebook.backends.baseten.backend import BasetenBackend

__all__ = ["BasetenBackend"]
