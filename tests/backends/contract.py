"""What every backend must do, ours and a user's: one function a rule, each given a `Case`.

Parametrise a test over `CONTRACT` and call the check with a case for your backend, as
`test_local_contract.py` does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tunebook.backends.base import Backend, LossFn, Session
from tunebook.errors import BackendError, CheckpointError, ConfigError, StaleGenerator
from tunebook.types import AdamParams, Datum, LoraConfig, SamplingParams, StopReason


@dataclass(frozen=True)
class Case:
    """A backend to judge and what to judge it with."""

    backend: Backend
    data: list[Datum]
    """At least four rows with `token_weights` that sum to 1, some of them 0."""
    loss_fn: LossFn
    lora: LoraConfig
    adam: AdamParams
    directory: Path
    tolerance: float
    """Absolute tolerance between two ways to compute the same log-prob or loss."""

    def open(self, name: str = "first", **settings) -> Session:
        return self.backend.open_session(
            name, self.lora, directory=self.directory / name, **settings
        )

    def train(self, session: Session, num_steps: int) -> list[float]:
        """Losses of some steps on all rows."""
        futures = []
        for _ in range(num_steps):
            futures.append(session.forward_backward(self.data, self.loss_fn))
            session.optim_step(self.adam)
        return [future.result()["loss"] for future in futures]


def logprobs_of(session: Session, data: list[Datum]) -> list[np.ndarray]:
    return [logprobs.numpy() for logprobs in session.forward(data).result()]


def forward_gives_one_logprob_per_scored_token(case: Case) -> None:
    session = case.open()
    for datum, logprobs in zip(case.data, logprobs_of(session, case.data), strict=True):
        assert logprobs.shape == (datum.num_scored,) and logprobs.dtype == np.float32
        supervised = datum.columns["token_weights"] != 0
        assert np.isnan(logprobs[~supervised]).all()
        assert (logprobs[supervised] < 0).all()


def loss_is_the_weighted_sum_of_logprobs(case: Case) -> None:
    session = case.open()
    expected = -sum(
        float(np.nansum(logprobs * datum.columns["token_weights"]))
        for datum, logprobs in zip(case.data, logprobs_of(session, case.data), strict=True)
    )
    metrics = session.forward_backward(case.data, case.loss_fn).result()
    assert metrics["loss"] == pytest.approx(expected, abs=case.tolerance)
    assert all(type(value) is float for value in metrics.values())


def training_lowers_the_loss(case: Case) -> None:
    losses = case.train(case.open(), 4)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def requests_of_one_step_add_up(case: Case) -> None:
    """Case 7: one batch, or the same rows in two requests, then one step: the same update."""
    whole, split = case.open("whole"), None
    whole.forward_backward(case.data, case.loss_fn)
    whole.optim_step(case.adam).result()
    expected = logprobs_of(whole, case.data)
    whole.close()
    split = case.open("split")
    parts = [split.forward_backward(rows, case.loss_fn) for rows in (case.data[:1], case.data[1:])]
    split.optim_step(case.adam).result()
    assert all(part.result()["loss"] > 0 for part in parts)
    for ours, theirs in zip(logprobs_of(split, case.data), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=case.tolerance)


def calls_take_effect_in_call_order(case: Case) -> None:
    session = case.open()
    before = session.forward(case.data)
    session.forward_backward(case.data, case.loss_fn)
    session.optim_step(case.adam)
    after = session.forward(case.data)
    # Waited for in the other order.
    late, early = after.result()[0].numpy(), before.result()[0].numpy()
    supervised = ~np.isnan(early)
    assert np.abs(late - early)[supervised].max() > case.tolerance


def a_failure_makes_later_results_raise(case: Case) -> None:
    session = case.open()
    failed = session.forward_backward(case.data, _failing_loss)
    later = session.optim_step(case.adam)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(BackendError):
        later.result()
    with pytest.raises(BackendError):
        session.forward(case.data).result()


def a_restored_session_goes_on_exactly(case: Case) -> None:
    """Case 85."""
    session = case.open("unbroken")
    case.train(session, 2)
    ref = session.save("step_2").result()
    expected = case.train(session, 2)
    session.close()
    restored = case.open("restored", restore=ref)
    assert case.train(restored, 2) == pytest.approx(expected, abs=case.tolerance)


def weights_alone_start_at_step_0(case: Case) -> None:
    """Case 85: a warm start has the weights but no optimizer state."""
    session = case.open("unbroken")
    case.train(session, 3)
    ref = session.save("step_3").result()
    here = logprobs_of(session, case.data)
    expected = case.train(session, 2)
    session.close()
    warm = case.open("warm", restore=ref, with_optimizer=False)
    for ours, theirs in zip(logprobs_of(warm, case.data), here, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=case.tolerance)
    losses = case.train(warm, 2)
    assert losses[0] == pytest.approx(expected[0], abs=case.tolerance)
    assert losses[1] != pytest.approx(expected[1], abs=case.tolerance)


def a_start_is_checked_without_opening_anything(case: Case) -> None:
    session = case.open()
    case.train(session, 1)
    ref = session.save("first").result()
    session.close()
    case.backend.check(case.lora, None)
    case.backend.check(case.lora, ref)
    if case.lora is not None:
        with pytest.raises(ConfigError):
            case.backend.check(replace(case.lora, rank=0), None)
        with pytest.raises(CheckpointError):
            case.backend.check(replace(case.lora, rank=2 * case.lora.rank), ref)
    # Nothing is open under this name.
    case.open()


def a_generator_is_stale_after_the_next_publish(case: Case) -> None:
    if not case.backend.capabilities.has_generator:
        pytest.skip("this backend has no generator")
    session = case.open()
    params = SamplingParams(max_tokens=4, temperature=1.0, top_p=1.0, top_k=0, stop=(), seed=0)
    prompts = [datum.tokens[:3].tolist() for datum in case.data[:2]]
    first = session.publish_weights().result()
    completions = first.sample(prompts, params, 2).result()
    assert [len(samples) for samples in completions] == [2, 2]
    for completion in completions[0] + completions[1]:
        assert 1 <= len(completion.tokens) <= 4
        assert len(completion.logprobs) == len(completion.tokens)
        assert (completion.logprobs <= 0).all()
        assert completion.version == first.version == 1
        assert completion.stop_reason in StopReason
    second = session.publish_weights().result()
    assert second.version == 2
    with pytest.raises(StaleGenerator):
        first.sample(prompts, params, 1).result()
    assert second.sample(prompts, params, 1).result()[0][0].version == 2


def log_probs_follow_the_temperature(case: Case) -> None:
    """Case 68: those of the sampler at the same temperature, rows of several in one batch."""
    if not case.backend.capabilities.temperature:
        pytest.skip("this backend knows no temperature")
    session = case.open()
    case.train(session, 1)
    generator = session.publish_weights().result()
    params = SamplingParams(max_tokens=6, temperature=1.0, top_p=1.0, top_k=0, stop=(), seed=0)
    prompts = [datum.tokens[:3].tolist() for datum in case.data[:2]]
    data, expected = [], []
    for temperature in (0.5, 1.0, 2.0):
        sampled = generator.sample(prompts, replace(params, temperature=temperature), 2).result()
        for prompt, completions in zip(prompts, sampled, strict=True):
            for completion in completions:
                tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
                weights = np.zeros(len(tokens) - 1, np.float32)
                weights[len(prompt) - 1 :] = 0.01
                columns = {"token_weights": weights, "temperature": temperature}
                data.append(Datum(tokens, columns))
                expected.append(completion.logprobs)
    for ours, theirs in zip(logprobs_of(session, data), expected, strict=True):
        np.testing.assert_allclose(ours[~np.isnan(ours)], theirs, atol=10 * case.tolerance)
    loss = session.forward_backward(data, case.loss_fn).result()["loss"]
    total = 0.01 * float(sum(values.sum() for values in expected))
    assert loss == pytest.approx(-total, abs=10 * case.tolerance)


def a_temperature_is_above_0(case: Case) -> None:
    if not case.backend.capabilities.temperature:
        pytest.skip("this backend knows no temperature")
    for number, temperature in enumerate((0.0, -1.0, math.nan, math.inf)):
        session = case.open(f"bad_{number}")
        first, second = case.data[:2]
        cold = Datum(second.tokens, {**second.columns, "temperature": temperature})
        with pytest.raises(BackendError, match=r"row 1 .*temperature"):
            session.forward([first, cold]).result()
        session.close()


def a_closed_session_takes_no_calls(case: Case) -> None:
    session = case.open()
    session.close()
    session.close()
    with pytest.raises(BackendError):
        session.forward(case.data).result()


def sessions_do_not_touch_each_other(case: Case) -> None:
    """Training one adapter leaves another, and the base, as they are."""
    if case.backend.capabilities.max_sessions < 2:
        pytest.skip("this backend trains one session at a time")
    trained, watched = case.open("trained"), case.open("watched")
    before = logprobs_of(watched, case.data)
    case.train(trained, 2)
    for ours, theirs in zip(logprobs_of(watched, case.data), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


CONTRACT: list[Callable[[Case], None]] = [
    forward_gives_one_logprob_per_scored_token,
    loss_is_the_weighted_sum_of_logprobs,
    training_lowers_the_loss,
    requests_of_one_step_add_up,
    calls_take_effect_in_call_order,
    a_failure_makes_later_results_raise,
    a_restored_session_goes_on_exactly,
    weights_alone_start_at_step_0,
    a_start_is_checked_without_opening_anything,
    a_generator_is_stale_after_the_next_publish,
    log_probs_follow_the_temperature,
    a_temperature_is_above_0,
    a_closed_session_takes_no_calls,
    sessions_do_not_touch_each_other,
]


def _failing_loss(logprobs, *, token_weights):
    del logprobs, token_weights
    raise ZeroDivisionError("this loss always fails")
