"""Tinker, the training service of Thinking Machines Lab."""

from tunebook.backends.tinker.backend import TinkerBackend

__all__ = ["TinkerBackend"]
