"""Rows without padding: one stream of tokens, in which every row attends to itself alone.

Nothing is computed for padding, and what is computed for a row does not depend on the rows beside
it: attention runs row by row, and the matrix products of a stream give each of its tokens the same
bits however many others there are (on a CPU, from a handful of tokens on).
Legend: B rows, T tokens of a row, N tokens of the stream, H hidden size, A heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

ROW_WISE = "tunebook_row_wise"
MIN_STREAM = 32
"""Tokens of the shortest stream; below a few, matrix products take other code and other bits."""
CHECK_LENGTHS = (5, 2, 9)

ROW_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("row_lengths")
"""Tokens of each row of the stream that is being computed."""


def row_wise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention of each row of a stream to itself, `[1, N, A, D]`.

    Called by transformers in place of its own attention.

    Args:
        module: the attention layer.
        query: `[1, A, N, D]`
        key: `[1, A', N, D]`, A' dividing A.
        value: as key.
        attention_mask: not read, rows are told apart by their lengths.
        scaling: of the scores; None = 1 / sqrt(D).
        sliding_window: tokens a token can see, itself included; None = all before it.

    Raises:
        NotImplementedError: the layer wants something that this does not compute.
    """
    del module, attention_mask
    unknown = [name for name, given in others.items() if name in UNSUPPORTED and given is not None]
    if unknown:
        raise NotImplementedError(f"row-wise attention does not compute {', '.join(unknown)}")
    lengths = list(ROW_LENGTHS.get())
    outputs = [
        F.scaled_dot_product_attention(
            query_row,
            key_row,
            value_row,
            attn_mask=_window_mask(query_row.shape[2], sliding_window, query.device),
            is_causal=sliding_window is None or query_row.shape[2] <= sliding_window,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for query_row, key_row, value_row in zip(
            query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2),
            strict=True,
        )
    ]  # fmt: skip
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


UNSUPPORTED = ("softcap", "position_bias", "s_aux")
AttentionInterface.register(ROW_WISE, row_wise_attention)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[T, T]` bool, True where a token sees another; None where the window hides nothing."""
    if window is None or length <= window:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


def stream_hidden(body: nn.Module, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Hidden states `[N, H]` of the rows, one after the other.

    Args:
        body: of a model that `supports_stream`.
        input_ids: `[N]`, the rows one after the other.
        lengths: tokens of each row, N together.
    """
    num_tokens = len(input_ids)
    fill = max(0, MIN_STREAM - num_tokens)
    rows = [*lengths, fill] if fill else list(lengths)
    positions = torch.cat([torch.arange(length) for length in rows]).to(input_ids.device)
    with _row_wise(body, rows):
        output = body(
            input_ids=F.pad(input_ids, (0, fill))[None],
            position_ids=positions[None],
            use_cache=False,
        )
    return output.last_hidden_state[0, :num_tokens]


@torch.no_grad()
def supports_stream(model: PreTrainedModel, body: nn.Module) -> bool:
    """Whether a stream of rows gives each row what it gives alone, in the model's own code.

    Models with attention of their own, with state-space layers, or with positions that they do not
    take from us do not.
    """
    if angles_depend_on_length(model.config):
        return False
    device = next(model.parameters()).device
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module) and isinstance(embeddings.weight, Tensor)
    total = sum(CHECK_LENGTHS)
    input_ids = torch.arange(total, device=device).mul(7).remainder(embeddings.weight.shape[0])
    alone = []
    for row in input_ids.split(list(CHECK_LENGTHS)):
        hidden = getattr(body(input_ids=row[None], use_cache=False), "last_hidden_state", None)
        if not isinstance(hidden, Tensor):
            return False
        alone.append(hidden[0])
    try:
        together = stream_hidden(body, input_ids, CHECK_LENGTHS)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return False  # the model's own code does not go this way; it is computed with padding
    expected = torch.cat(alone)
    tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
    scale = float(expected.abs().max()) or 1.0
    return bool((together - expected).abs().max() <= tolerance * scale)


def angles_depend_on_length(config: PreTrainedConfig) -> bool:
    """Whether a model rotates all rows of a batch by what the longest of them asks for."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


def rotate_rows_alone(model: PreTrainedModel) -> None:
    """Makes such a model rotate each row of a batch by what it asks for itself.

    The positions of padding count too, so padding has to have one that is in the row.
    """
    for module in model.modules():
        if "rope_type" in vars(module):
            module.forward = partial(_angles_by_row, module.forward)


def _angles_by_row(
    angles: Callable[..., tuple[Tensor, ...]],
    inputs: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> tuple[Tensor, ...]:
    """Cosines and sines `[B, T, D]` of positions `[B, T]`, each row as if it were alone."""
    named = {} if layer_type is None else {"layer_type": layer_type}
    found = []
    for positions_1T in position_ids.split(1):
        # After a first token alone, dynamic factors no longer grow with what was seen before.
        angles(inputs, torch.zeros_like(positions_1T[:, :1]), **named)
        found.append(angles(inputs, positions_1T, **named))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@contextmanager
def _row_wise(body: nn.Module, lengths: Sequence[int]) -> Iterator[None]:
    """Row-wise attention in all layers of a body for one forward pass."""
    configs = {
        id(config): config
        for module in body.modules()
        if (config := getattr(module, "config", None)) is not None
        and hasattr(config, "_attn_implementation")
    }
    before = {name: config._attn_implementation for name, config in configs.items()}
    token = ROW_LENGTHS.set(tuple(lengths))
    for config in configs.values():
        config._attn_implementation = ROW_WISE
    try:
        yield
    finally:
        ROW_LENGTHS.reset(token)
        for name, config in configs.items():
            config._attn_implementation = before[name]
