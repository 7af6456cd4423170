"""Runs the operations of several sessions together over one decoder.

Legend: B rows of one operation in one stream, T tokens, N tokens of the stream, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunebook.backends.local.base_model import BaseModel
from tunebook.backends.local.engine import head
from tunebook.backends.local.engine.adapters import AdapterSpan, AppliedAdapter
from tunebook.backends.local.engine.decoder import Decoder, check_rows, read_decoder
from tunebook.backends.local.engine.layers import (
    Pass,
    Ran,
    normalised,
    normalised_backward,
    run_layers,
    run_layers_backward,
)
from tunebook.backends.local.engine.layout import (
    SIZE_STEP,
    Group,
    Segment,
    Span,
    Stream,
    groups_of,
    lay_out,
    pack,
)
from tunebook.backends.local.engine.products import linear
from tunebook.backends.local.logprobs import supervised, temperatures_of
from tunebook.backends.local.tuning import should_recompute
from tunebook.types import Datum

MAX_GROUP = 2048
"""Tokens of a group of rows that begin alike; not more, however much memory there is, so that rows
meet in the same groups on every machine."""


@dataclass(slots=True)
class Job:
    """A forward, or a forward and backward, of one session's rows."""

    rows: Sequence[Datum]
    adapter: AppliedAdapter | None
    """None = the base alone."""
    score: Callable[[Sequence[int], Tensor], Tensor | None] | None
    """`(row numbers, log-probs [B, T]) -> gradient of the log-probs, [B, T]`; called once for each
    stream that holds rows of the job. None from it = no gradient. Without a score, the job is a
    forward."""
    rows_per_unit: int = 1
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """Row number -> `[T]` float32, NaN where not computed; filled where there is no score."""
    has_gradient: bool = False
    """Whether `score` gave a gradient, be it 0, for a row that carries weight."""
    error: Exception | None = None
    """What `score` raised; the job's other rows are not computed then."""


@dataclass(frozen=True, slots=True)
class Selected:
    """Positions of one job in a stream whose log-probs are wanted."""

    row_index: np.ndarray
    """`[M]` of the rows of the job in this stream."""
    column: np.ndarray
    """`[M]` position in the row."""
    place: np.ndarray
    """`[M]` position in the stream."""
    target: np.ndarray
    """`[M]` token that is scored."""
    temperature: np.ndarray | None
    """`[M]` float32, what the logits are divided by; None = 1 everywhere."""


class Engine:
    """The fast path over one base model."""

    def __init__(self, base: BaseModel, decoder: Decoder, *, recompute: bool) -> None:
        """Takes a base model and its decoder.

        Args:
            base: the frozen model.
            decoder: of the model.
            recompute: keep less for the backward pass and compute it again.
        """
        assert base.logits_rule is not None
        self.base = base
        self.decoder = decoder
        self.recompute = recompute
        unchanged = torch.zeros(1)
        self._rule = None if base.logits_rule(unchanged) is unchanged else base.logits_rule

    def run(self, jobs: Sequence[Job], *, max_tokens: int) -> None:
        """Runs jobs, all forward or all forward and backward; results and errors go into the jobs.

        Args:
            jobs: of any sessions.
            max_tokens: of a stream.
        """
        inputs = [[datum.tokens[:-1] for datum in job.rows] for job in jobs]
        groups: list[tuple[int, Group]] = []
        for number, (job, rows) in enumerate(zip(jobs, inputs, strict=True)):
            # Of each job alone: what others bring must not change how its rows are computed.
            longest = max((len(row) for row in rows), default=0)
            share = self.decoder.window is None or longest < self.decoder.window
            found = groups_of(
                rows,
                rows_per_unit=job.rows_per_unit,
                max_tokens=min(max_tokens, MAX_GROUP),
                share=share,
            )
            groups.extend((number, group) for group in found)
        for members in pack([group.num_tokens for _, group in groups], max_size=max_tokens):
            chosen: list[list[Group]] = [[] for _ in jobs]
            for member in members:
                number, group = groups[member]
                if jobs[number].error is None:
                    chosen[number].append(group)
            if any(chosen):
                self._run_stream(jobs, lay_out(inputs, chosen))

    def begin(
        self,
        stream: Stream,
        adapters: Sequence[AppliedAdapter | None],
        *,
        wanted: np.ndarray | None,
    ) -> Pass:
        """A stream with the adapter of each of its operations; `wanted` as in `Pass`."""
        positions = torch.from_numpy(stream.positions).to(self.decoder.device)
        # Elsewhere products of other sizes are computed otherwise anyway, and many are slow.
        on_cpu = self.decoder.device.type == "cpu"
        spans = [
            AdapterSpan(adapter, tokens, groups if on_cpu else (tokens,))
            for adapter, tokens, groups in zip(adapters, stream.members, stream.groups, strict=True)
            if tokens.length
        ]
        return Pass(self.decoder, stream, spans, self.decoder.rotations(positions), wanted)

    @property
    def head_weight(self) -> Tensor:
        """`[V, H]`, of the output head."""
        weight = self.base.head.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @torch.no_grad()
    def logits(self, hidden: Tensor, head_weight: Tensor | None = None) -> Tensor:
        """Logits `[N, V]` float32 of hidden states `[N, H]` that are not normalised.

        Args:
            hidden: as `run_layers` returns them.
            head_weight: the output head's weights in another layout; None = as they are.
        """
        weight = self.head_weight if head_weight is None else head_weight
        normed = normalised(hidden, self.decoder.final_norm).to(self.decoder.dtype)
        raw = linear(normed, weight, getattr(self.base.head, "bias", None)).float()
        return raw if self._rule is None else self._rule(raw)

    def _run_stream(self, jobs: Sequence[Job], stream: Stream) -> None:
        backward = any(job.score is not None for job in jobs)
        first_trained = None
        if backward:
            first_trained = min(
                job.adapter.first_layer
                for job, rows in zip(jobs, stream.rows, strict=True)
                if rows and job.adapter is not None
            )
        selections = [
            select(job.rows, stream.rows[number], stream.places[number])
            for number, job in enumerate(jobs)
        ]
        wanted = np.concatenate(
            [
                filled_up(np.unique(found.place), span)
                for found, span in zip(selections, stream.members, strict=True)
            ]
        )
        given = self.begin(padded(stream), [job.adapter for job in jobs], wanted=wanted)
        ran = run_layers(given, first_trained=first_trained, recompute=self.recompute)
        targets = torch.from_numpy(np.concatenate([found.target for found in selections]))
        place = np.concatenate([found.place for found in selections])
        places = torch.from_numpy(np.searchsorted(wanted, place)).to(self.decoder.device)
        hidden = ran.hidden[places]
        temperatures = joined_temperatures(selections)
        result = self._logprobs(hidden, targets, temperatures, with_slopes=backward)
        gradients: list[Tensor] = []
        start = 0
        for number, (job, found) in enumerate(zip(jobs, selections, strict=True)):
            stop = start + len(found.place)
            logprobs = result.logprobs[start:stop]
            if stream.rows[number]:
                gradients.append(self._settle(job, stream.rows[number], found, logprobs))
            start = stop
        if backward:
            self._backward(given, ran, hidden, places, result, torch.cat(gradients))

    def _logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: np.ndarray | None,
        *,
        with_slopes: bool,
    ) -> head.HeadResult:
        divisors = None
        if temperatures is not None:
            divisors = torch.from_numpy(temperatures).to(self.decoder.device)
        return head.target_logprobs(
            normalised(hidden, self.decoder.final_norm).to(self.decoder.dtype),
            targets.to(self.decoder.device).long(),
            weight=self.head_weight,
            bias=getattr(self.base.head, "bias", None),
            rule=self._rule,
            temperatures=divisors,
            with_slopes=with_slopes,
        )

    def _settle(self, job: Job, rows: tuple[int, ...], found: Selected, logprobs: Tensor) -> Tensor:
        """Gives a job its log-probs; returns their gradient, `[M]`."""
        longest = max(job.rows[row].num_scored for row in rows)
        fill = torch.nan if job.score is None else 0.0
        padded_BT = torch.full((len(rows), longest), fill, device=logprobs.device)
        at = (
            torch.from_numpy(found.row_index).to(logprobs.device),
            torch.from_numpy(found.column).to(logprobs.device),
        )
        padded_BT[at] = logprobs
        if job.score is None:
            on_cpu = padded_BT.cpu()
            for index, row in enumerate(rows):
                # A copy: a view would keep the padded rows alive.
                job.logprobs[row] = on_cpu[index, : job.rows[row].num_scored].clone()
            return torch.zeros_like(logprobs)
        try:
            gradient_BT = job.score(rows, padded_BT)
        except Exception as error:
            # It concerns this job alone; those that share the stream go on.
            job.error = error
            return torch.zeros_like(logprobs)
        if gradient_BT is None or not len(found.place):
            return torch.zeros_like(logprobs)
        job.has_gradient = True
        return gradient_BT[at].float()

    def _backward(
        self,
        given: Pass,
        ran: Ran,
        hidden: Tensor,
        places: Tensor,
        result: head.HeadResult,
        gradients: Tensor,
    ) -> None:
        if not bool(gradients.any()):
            return
        assert result.slopes is not None
        outer = normalised_backward(
            result.slopes * gradients[:, None], hidden, self.decoder.final_norm
        )
        gradient = torch.zeros_like(ran.hidden)
        gradient.index_add_(0, places, outer)
        run_layers_backward(given, ran, gradient)


def select(rows: Sequence[Datum], numbers: Sequence[int], places: Sequence[np.ndarray]) -> Selected:
    """The positions of some rows that carry weight.

    Args:
        rows: of the job.
        numbers: of the rows in the stream.
        places: for each of them `[T]`, where its tokens stand.
    """
    empty = np.zeros(0, np.int64)
    row_index, column, place, target = [empty], [empty], [empty], [empty]
    for index, (number, row_places) in enumerate(zip(numbers, places, strict=True)):
        columns = np.flatnonzero(supervised(rows[number]))
        row_index.append(np.full(len(columns), index))
        column.append(columns)
        place.append(row_places[columns].astype(np.int64))
        target.append(rows[number].tokens[1:][columns].astype(np.int64))
    rows_of_positions = np.concatenate(row_index)
    temperatures = temperatures_of([rows[number] for number in numbers])
    return Selected(
        row_index=rows_of_positions,
        column=np.concatenate(column),
        place=np.concatenate(place),
        target=np.concatenate(target),
        temperature=None if temperatures is None else temperatures[rows_of_positions],
    )


def joined_temperatures(selections: Sequence[Selected]) -> np.ndarray | None:
    """The temperatures of all positions of a stream, `[N]`; None where all of them are 1."""
    if all(found.temperature is None for found in selections):
        return None
    return np.concatenate(
        [
            np.ones(len(found.place), np.float32)
            if found.temperature is None
            else found.temperature
            for found in selections
        ]
    )


def filled_up(wanted: np.ndarray, span: Span) -> np.ndarray:
    """A multiple of `SIZE_STEP` ascending places of a span, if it has as many, the wanted included.

    Args:
        wanted: `[M]` ascending places in the span.
        span: of one operation.
    """
    missing = -len(wanted) % SIZE_STEP
    if not missing or not span.length:
        return wanted
    others = np.setdiff1d(np.arange(span.start, span.stop), wanted)[:missing]
    return np.sort(np.concatenate([wanted, others]))


def padded(stream: Stream) -> Stream:
    """A stream of a multiple of `SIZE_STEP` tokens; what is added sees nothing and is not seen."""
    missing = -stream.num_tokens % SIZE_STEP
    if not missing:
        return stream
    span = Span(stream.num_tokens, stream.num_tokens + missing)
    return replace(
        stream,
        tokens=np.concatenate([stream.tokens, np.zeros(missing, np.int32)]),
        positions=np.concatenate([stream.positions, np.arange(missing, dtype=np.int32)]),
        segments=(*stream.segments, Segment(span, None)),
    )


def make_engine(base: BaseModel, *, recompute: bool | None) -> Engine | None:
    """The fast path over a base model, or None if it is not known to compute what the model does.

    Args:
        base: frozen.
        recompute: see `Engine`; None = where memory is short.
    """
    if base.logits_rule is None:
        return None
    decoder = read_decoder(base.model, base.body)
    if decoder is None or not agrees(base.model, base.body, decoder):
        return None
    if recompute is None:
        recompute = should_recompute(decoder)
    return Engine(base, decoder, recompute=recompute)


@torch.no_grad()
def agrees(model: PreTrainedModel, body: torch.nn.Module, decoder: Decoder) -> bool:
    """Whether a decoder gives the hidden states that the model's own code gives.

    The rows checked share a beginning, which the decoder computes once and the model each time.
    """
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Module) and isinstance(embeddings.weight, Tensor)
    rows = check_rows(embeddings.weight.shape[0], window=decoder.window)
    longest = max(len(row) for row in rows)
    share = decoder.window is None or longest < decoder.window
    groups = groups_of(rows, rows_per_unit=1, max_tokens=longest * len(rows), share=share)
    stream = lay_out([rows], [groups])
    positions = torch.from_numpy(stream.positions).to(decoder.device)
    given = Pass(decoder, stream, [], decoder.rotations(positions))
    ran = run_layers(given, first_trained=None, recompute=False)
    found = normalised(ran.hidden, decoder.final_norm)
    # bfloat16 keeps 8 bits, and the model's own code rounds its residual stream to it, too.
    tolerance = 1e-4 if decoder.dtype == torch.float32 else 1e-1
    for row, places in zip(rows, stream.places[0], strict=True):
        tokens = torch.from_numpy(row).to(decoder.device).long()[None]
        expected = body(input_ids=tokens, use_cache=False).last_hidden_state[0].float()
        own = found[torch.from_numpy(places).to(decoder.device).long()]
        if not float((own - expected).norm()) <= tolerance * float(expected.norm()):
            return False
    return True
