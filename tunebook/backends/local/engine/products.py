"""Matrix products with frozen weights. Legend: N tokens, I input features, O output features.

On a CPU, torch's float32 product goes through MKL, which on some processors reaches two thirds of
what oneDNN reaches; its bfloat16 product goes through oneDNN already. torch offers oneDNN's float32
product as an operator of its own; it is used where it is there and agrees with torch's own.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

AGREEMENT = 1e-5
"""Largest relative difference between the two products: rounding of float32, not of less."""


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, `[N, O]`.

    Args:
        inputs: `[N, I]`
        weight: `[O, I]`, contiguous, transposed, or laid out by `packed`.
        bias: `[O]`
    """
    if weight.is_mkldnn or uses_onednn(inputs):
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return F.linear(inputs, weight, bias)


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the inputs of `linear`, `[N, I]`, from that of its result, `[N, O]`."""
    return linear(gradient, weight.t())


def uses_onednn(inputs: Tensor) -> bool:
    """Whether a product goes to oneDNN's own operator."""
    return inputs.device.type == "cpu" and inputs.dtype == torch.float32 and onednn_agrees()


@functools.cache
def onednn_agrees() -> bool:
    """Whether oneDNN's float32 product is there and as exact as torch's own.

    An operator of a build without oneDNN is missing; one that rounds its inputs to bfloat16, as
    processors with matrix tiles can be told to, is off by far more than float32's rounding.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 256, generator=generator)
    weight = torch.randn(96, 256, generator=generator)
    exact = inputs.double() @ weight.double().t()
    try:
        results = [
            torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], ""),
            torch.ops.mkldnn._linear_pointwise(
                inputs, weight.t().contiguous().t(), None, "none", [], ""
            ),
        ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False  # another torch, where the operator is not there or takes other arguments
    scale = float(exact.abs().max())
    return all(float((result - exact).abs().max()) <= AGREEMENT * scale for result in results)
