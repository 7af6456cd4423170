"""Log-probs of target tokens, computed only where they are needed.

Legend: B rows, T tokens, N selected positions, H hidden size, V vocabulary, C rows of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tunebook.backends.local.base_model import BaseModel, body_hidden
from tunebook.backends.local.stream import MIN_STREAM, angles_depend_on_length, stream_hidden
from tunebook.errors import BackendError
from tunebook.types import Datum, FloatArray

# Logit values of one chunk: 64 MiB in float32, whatever the vocabulary.
CHUNK_LOGITS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one micro-batch on the device, padded on the right."""

    input_ids: Tensor
    """`[B, T]`"""
    attention_mask: Tensor | None
    """`[B, T]`; None where no row is padded."""
    real: Tensor
    """`[B, T]` bool, False at padding."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    targets: Tensor
    """`[B, T]`, the token that follows each input token."""
    selected: Tensor
    """`[B, T]` bool, positions whose log-prob is wanted."""
    temperatures: Tensor | None
    """`[B]` float32, what the logits of each row are divided by; None = 1 everywhere."""


def collate(data: Sequence[Datum], *, num_columns: int, device: torch.device) -> Batch:
    """The rows as one batch; positions of token weight 0 and padding are not selected."""
    num_rows = len(data)
    input_ids_BT = np.zeros((num_rows, num_columns), np.int64)
    targets_BT = np.zeros((num_rows, num_columns), np.int64)
    real_BT = np.zeros((num_rows, num_columns), bool)
    selected_BT = np.zeros((num_rows, num_columns), bool)
    for row, datum in enumerate(data):
        length = datum.num_scored
        input_ids_BT[row, :length] = datum.tokens[:-1]
        targets_BT[row, :length] = datum.tokens[1:]
        real_BT[row, :length] = True
        selected_BT[row, :length] = supervised(datum)
    padded = not real_BT.all()
    temperatures = temperatures_of(data)
    return Batch(
        input_ids=torch.from_numpy(input_ids_BT).to(device),
        attention_mask=torch.from_numpy(real_BT.astype(np.int64)).to(device) if padded else None,
        real=torch.from_numpy(real_BT).to(device),
        lengths=tuple(datum.num_scored for datum in data),
        targets=torch.from_numpy(targets_BT).to(device),
        selected=torch.from_numpy(selected_BT).to(device),
        temperatures=None if temperatures is None else torch.from_numpy(temperatures).to(device),
    )


def temperatures_of(data: Sequence[Datum]) -> FloatArray | None:
    """`[B]`: the temperature of every row; None where all of them are 1."""
    if not any("temperature" in datum.columns for datum in data):
        return None
    values = np.asarray([datum.columns.get("temperature", 1.0) for datum in data], np.float32)
    return None if (values == 1).all() else values


def supervised(datum: Datum) -> np.ndarray:
    """`[T]` bool: where the datum carries weight; everywhere if it has no `token_weights`."""
    weights = datum.columns.get("token_weights")
    if weights is None:
        return np.ones(datum.num_scored, bool)
    return np.broadcast_to(np.asarray(weights) != 0, (datum.num_scored,))


def collate_columns(
    data: Sequence[Datum], names: Sequence[str], *, num_columns: int, device: torch.device
) -> dict[str, Tensor]:
    """The named columns as float32 tensors: `[B, T]` padded with 0, or `[B]` for plain floats.

    Raises:
        BackendError: a row lacks a column, or has it in another shape than the other rows.
    """
    columns: dict[str, Tensor] = {}
    for name in names:
        missing = [row for row, datum in enumerate(data) if name not in datum.columns]
        if missing:
            raise BackendError(
                f"the loss reads the column {name!r}, which row {missing[0]} of this batch lacks "
                f"(it has {', '.join(sorted(data[missing[0]].columns)) or 'none'})"
            )
        values = [datum.columns[name] for datum in data]
        per_row = [isinstance(value, float) for value in values]
        if all(per_row):
            columns[name] = torch.tensor(values, dtype=torch.float32, device=device)
        elif any(per_row):
            raise BackendError(
                f"the column {name!r} is one number in some rows of this batch and one number per "
                "token in others"
            )
        else:
            padded = np.zeros((len(data), num_columns), np.float32)
            for row, value in enumerate(values):
                padded[row, : data[row].num_scored] = value
            columns[name] = torch.from_numpy(padded).to(device)
    return columns


def target_logprobs(
    base: BaseModel,
    batch: Batch,
    *,
    fill: float,
    replay: Callable[[], AbstractContextManager[None]] | None = None,
) -> Tensor:
    """Log-probs of the targets, `[B, T]` float32, `fill` where not selected.

    Args:
        base: the model, with whatever adapter is applied to it.
        batch: see `Batch`.
        fill: value of positions that are not selected; no gradient passes through them.
        replay: what to wrap the second computation of a chunk in, so that it draws the same
            dropout as the first; None = nothing is random.
    """
    positions_N = batch.selected.flatten().nonzero().squeeze(1)
    logprobs = torch.full((batch.targets.numel(),), fill, device=base.device)
    if len(positions_N) == 0:
        return logprobs.view_as(batch.targets)
    targets_N = batch.targets.flatten()[positions_N]
    temperatures_N = None
    if batch.temperatures is not None:
        temperatures_N = batch.temperatures[positions_N // batch.targets.shape[1]]
    with base.computing():
        if base.logits_rule is None:
            logits_BTV = base.model(**_padded_inputs(base, batch), use_cache=False).logits
            logits_NV = logits_BTV.flatten(0, 1)[positions_N]
            selected_N = gather_logprobs(logits_NV, targets_N, temperatures_N)
        else:
            hidden_NH = _selected_hidden(base, batch, positions_N)
            selected_N = head_logprobs(base, hidden_NH, targets_N, temperatures_N, replay=replay)
    return logprobs.index_put((positions_N,), selected_N).view_as(batch.targets)


def _selected_hidden(base: BaseModel, batch: Batch, positions_N: Tensor) -> Tensor:
    """Hidden states of the selected positions, `[N, H]`, without padding where the model can."""
    if base.streams:
        stream = stream_hidden(base.body, batch.input_ids[batch.real], batch.lengths)
        return stream[batch.selected[batch.real]]
    hidden_BTH = body_hidden(base.body, **_padded_inputs(base, batch))
    assert hidden_BTH is not None
    return hidden_BTH.flatten(0, 1)[positions_N]


def _padded_inputs(base: BaseModel, batch: Batch) -> dict[str, Tensor]:
    inputs = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
        if angles_depend_on_length(base.model.config):
            # Padding has the position of the last token before it, so it makes no row longer.
            inputs["position_ids"] = batch.attention_mask.cumsum(1) - 1
    return inputs


def head_logprobs(
    base: BaseModel,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor | None,
    *,
    replay: Callable[[], AbstractContextManager[None]] | None,
) -> Tensor:
    """Log-probs of the targets, `[N]` float32, without ever holding all logits.

    Logits are computed in chunks of rows; where there are several, again in the backward pass of
    each, so that one chunk of them is kept at most.
    """

    def chunk_logprobs(
        hidden_CH: Tensor, targets_C: Tensor, temperatures_C: Tensor | None
    ) -> Tensor:
        assert base.logits_rule is not None
        if replay is None:  # more rows would draw more dropout
            hidden_CH = F.pad(hidden_CH, (0, 0, 0, max(0, MIN_STREAM - len(targets_C))))
        logits_CV = base.head(hidden_CH)[: len(targets_C)]
        # The rule is applied in float32: a soft cap in bfloat16 would round the logits.
        return gather_logprobs(base.logits_rule(logits_CV.float()), targets_C, temperatures_C)

    num_rows = max(1, CHUNK_LOGITS // base.vocab_size)
    chunks = []
    for start in range(0, len(targets_N), num_rows):
        part = slice(start, start + num_rows)
        hidden_CH, targets_C = hidden_NH[part], targets_N[part]
        temperatures_C = None if temperatures_N is None else temperatures_N[part]
        if torch.is_grad_enabled() and len(hidden_NH) > num_rows:
            chunk = checkpoint(
                chunk_logprobs,
                hidden_CH,
                targets_C,
                temperatures_C,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), replay() if replay else nullcontext()),
            )
            assert isinstance(chunk, Tensor)
        else:
            chunk = chunk_logprobs(hidden_CH, targets_C, temperatures_C)
        chunks.append(chunk)
    return torch.cat(chunks)


def gather_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor | None = None
) -> Tensor:
    """Log-probs of the targets, `[N]`, in float32.

    Args:
        logits_NV: `[N, V]`
        targets_N: `[N]`
        temperatures_N: `[N]`, what the logits are divided by; None = 1.
    """
    logits_NV = logits_NV.float()
    if temperatures_N is not None:
        logits_NV = logits_NV / temperatures_N[:, None]
    chosen_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
    return chosen_N - logits_NV.logsumexp(dim=1)


@contextmanager
def replayed(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    """Draws from `generator` as it was at `state`, then puts it back as it is now."""
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
