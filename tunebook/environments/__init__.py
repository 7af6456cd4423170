"""Conversations in which something answers the model: the protocol, and what is built in."""

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
