"""Together AI's post-training service."""

from tunebook.backends.together.backend import TogetherBackend

__all__ = ["TogetherBackend"]
