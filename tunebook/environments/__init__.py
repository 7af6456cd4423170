"""Conversations in which something answers the model: the protocol, and what is built in.

There is no adapter for the environments of the package `verifiers`. Version 0.4 installs beside
tunebook, but nothing in it can be stepped: a harness, which is a program in a process or container
of its own, holds the conversation and asks for completions over HTTP, one at a time and as text,
through a server that speaks to a vLLM endpoint and tokenises with a renderer of its own. A recipe
that samples a whole batch from its own weights cannot take the place of that endpoint. Its reward
functions and tool servers can be called from an `Environment` where they are plain Python.
"""

from tunebook.environments.calculator import Calculator
from tunebook.environments.protocol import Environment, Start, Step, ToolCall, Turn
from tunebook.environments.running import Environments, Failure, build_environments

__all__ = [
    "Calculator",
    "Environment",
    "Environments",
    "Failure",
    "Start",
    "Step",
    "ToolCall",
    "Turn",
    "build_environments",
]
