"""Training on the local backend: micro-batches, losses, optimizers, refusals."""

import functools
import math

import numpy as np
import pytest
import torch

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import VOCAB_SIZE, make_adam, make_data, make_lora, make_muon
from tunebook.errors import BackendError, ConfigError, NonFiniteError
from tunebook.types import Datum


def parameters_of(session) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in session._weights.parameters.items()}


def gradients_of(session) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in session._weights.parameters.items()}


@pytest.mark.parametrize("lora", [make_lora(), None], ids=["adapter", "full"])
def test_micro_batch_size_changes_nothing(open_backend, tmp_path, lora) -> None:
    """Case 3 and the issue's rule: equal loss and equal weights to 1e-6 for any token budget.

    Rows of 1, 2, 3, 10 answer tokens after 4 prompt tokens: 4, 5, 6, 13 inputs. A budget of 1 is a
    row each, 13 and 26 are splits, 1000 is all at once.
    """
    data = make_data((1, 2, 3, 10))
    results = []
    for budget in (1, 13, 26, 1000):
        backend = open_backend(micro_batch_tokens=budget)
        session = backend.open_session("a", lora, directory=tmp_path)
        losses = []
        for _ in range(2):
            losses.append(session.forward_backward(data, cross_entropy).result()["loss"])
            # Adam divides by the gradient's size, so tiny gradients would blow rounding up.
            session.optim_step(make_adam(learning_rate=1e-3, eps=1e-3)).result()
        results.append((losses, parameters_of(session)))
        backend.close()
    for losses, parameters in results[1:]:
        assert losses == pytest.approx(results[0][0], abs=1e-6)
        for name, value in parameters.items():
            assert torch.allclose(value, results[0][1][name], rtol=0, atol=1e-6), name


def test_logged_loss_is_nll_over_supervised_tokens(open_backend, tmp_path) -> None:
    """Case 3: sum of token NLL / 16 supervised tokens, for training and evaluation."""
    data = make_data((1, 2, 3, 10))
    backend = open_backend()
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    model = session._base.model
    nll = 0.0
    for datum, length in zip(data, (1, 2, 3, 10), strict=True):
        tokens = torch.from_numpy(datum.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
        nll -= float(chosen[-length:].sum())
    metrics = session.forward_backward(data, cross_entropy).result()
    assert metrics["loss"] == pytest.approx(nll / 16, abs=1e-5)
    assert metrics["num_tokens"] == 16
    evaluated = [
        datum.columns["token_weights"] @ np.nan_to_num(logprobs.numpy())
        for datum, logprobs in zip(data, session.forward(data).result(), strict=True)
    ]
    assert -sum(evaluated) == pytest.approx(nll / 16, abs=1e-5)


def test_a_partial_last_window_is_not_scaled(open_backend, tmp_path) -> None:
    """Case 2: 5 rows in windows of 4: the second step's gradient is that of its row in full.

    The row's weights sum to 1 in its step, so there is no 4 to divide by.
    """
    rows = [make_data((3,), seed=seed)[0] for seed in range(5)]
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    for row in rows[:4]:
        quarter = Datum(row.tokens, {"token_weights": row.columns["token_weights"] / 4})
        session.forward_backward([quarter], cross_entropy)
    session.optim_step(make_adam()).result()
    reference = session.save("before_last").result()
    session.forward_backward(rows[4:], cross_entropy).result()
    in_window = gradients_of(session)
    session.close()
    alone = open_backend().open_session("b", make_lora(), directory=tmp_path, restore=reference)
    alone.forward_backward(rows[4:], cross_entropy).result()
    for name, gradient in gradients_of(alone).items():
        assert torch.equal(gradient, in_window[name])
    assert session.step == 1 and alone.step == 1


def test_gradients_add_up_until_the_step(open_backend, tmp_path) -> None:
    """Case 7: a second request adds to the first, and a step clears both."""
    data = make_data()
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(data, cross_entropy).result()
    once = gradients_of(session)
    session.forward_backward(data, cross_entropy).result()
    for name, gradient in gradients_of(session).items():
        assert torch.allclose(gradient, 2 * once[name], atol=1e-6)
    session.optim_step(make_adam()).result()
    assert all(p.grad is None for p in session._weights.parameters.values())


def test_a_co_tenant_changes_nothing(open_backend, tmp_path) -> None:
    """Case 4: an adapter's update with another of 30 rows beside it equals its update alone."""
    mine, theirs = make_data((2, 5)), make_data([3] * 30, seed=9)
    alone = open_backend().open_session("a", make_lora(), directory=tmp_path)
    alone.forward_backward(mine, cross_entropy)
    alone.optim_step(make_adam()).result()
    backend = open_backend()
    first = backend.open_session("a", make_lora(), directory=tmp_path)
    second = backend.open_session("b", make_lora(seed=3, rank=2), directory=tmp_path)
    before = {name: value.clone() for name, value in first._base.model.state_dict().items()}
    futures = []
    for session, rows in ((second, theirs), (first, mine)):
        futures.append(session.forward_backward(rows, cross_entropy))
        session.optim_step(make_adam())
    assert all(math.isfinite(future.result()["loss"]) for future in futures)
    first.forward(mine).result()
    for name, value in parameters_of(first).items():
        assert torch.allclose(value, parameters_of(alone)[name], rtol=0, atol=1e-6)
    for name, value in first._base.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_training_leaves_the_base_and_its_gradients_alone(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    base = {name: value.clone() for name, value in session._base.model.named_parameters()}
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam()).result()
    for name, parameter in session._base.model.named_parameters():
        assert torch.equal(parameter, base[name]) and parameter.grad is None
        assert not parameter.requires_grad


def test_forward_changes_no_byte(open_backend, tmp_path) -> None:
    """Case 48: evaluation is forward only; adapter, gradient and step stay as they are."""
    data = make_data()
    session = open_backend().open_session("a", make_lora(dropout=0.5), directory=tmp_path)
    session.forward_backward(data, cross_entropy)
    session.optim_step(make_adam()).result()
    session.forward_backward(data, cross_entropy).result()
    before, gradients = parameters_of(session), gradients_of(session)
    random = session._weights.generator.get_state()
    session.forward(data).result()
    for name, value in parameters_of(session).items():
        assert torch.equal(value, before[name])
        assert torch.equal(session._weights.parameters[name].grad, gradients[name])
    assert torch.equal(session._weights.generator.get_state(), random)
    assert session.step == 1


def test_forward_is_nan_exactly_where_weight_is_0(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    weighted = Datum(
        np.arange(10, 16, dtype=np.int32),
        {"token_weights": np.array([0, 0.5, 0, -1, 0], np.float32)},
    )
    bare = Datum(weighted.tokens)
    some, every = session.forward([weighted, bare]).result()
    assert torch.isnan(some).tolist() == [True, False, True, False, True]
    assert not torch.isnan(every).any() and every.dtype == torch.float32
    assert torch.allclose(some[[1, 3]], every[[1, 3]], atol=1e-5)


def test_loss_gets_the_columns_it_names_and_nothing_else(open_backend, tmp_path) -> None:
    """Per-token columns arrive `[B, T]` padded with 0, floats `[B]`; log-probs 0 where masked."""
    seen = {}

    def loss(logprobs, *, advantages, reward, token_weights, beta):
        seen.update(logprobs=logprobs.detach(), advantages=advantages, reward=reward, beta=beta)
        return -(logprobs * token_weights * advantages).sum(), {"reward": reward.sum()}

    rows = [
        Datum(
            np.array([3, 4, 5, 6], np.int32),
            {
                "token_weights": np.array([0, 1, 1], np.float32),
                "advantages": np.array([7, 8, 9], np.float32),
                "reward": 0.5,
                "unused": 1.0,
            },
        ),
        Datum(
            np.array([3, 4], np.int32),
            {
                "token_weights": np.array([1], np.float32),
                "advantages": np.array([6], np.float32),
                "reward": 0.25,
                "unused": 2.0,
            },
        ),
    ]
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    metrics = session.forward_backward(rows, functools.partial(loss, beta=2.0)).result()
    assert metrics["reward"] == 0.75
    assert seen["advantages"].tolist() == [[7, 8, 9], [6, 0, 0]]
    assert seen["reward"].tolist() == [0.5, 0.25] and seen["beta"] == 2.0
    assert (seen["logprobs"] != 0).tolist() == [[False, True, True], [True, False, False]]


def test_a_missing_column_is_named(open_backend, tmp_path) -> None:
    def loss(logprobs, *, token_weights, reference_logprobs):
        raise AssertionError("not reached")

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(BackendError, match=r"'reference_logprobs', which row 0 .*token_weights"):
        session.forward_backward(make_data(), loss).result()


def test_units_meet_in_one_micro_batch(open_backend, tmp_path) -> None:
    """Pairs stay together and in order at every budget, chosen before rejected."""
    seen: list[list[float]] = []

    def loss(logprobs, *, token_weights, pair):
        seen.append(pair.tolist())
        return -(logprobs * token_weights).sum(), {}

    rows = [
        Datum(datum.tokens, {**datum.columns, "pair": float(index)})
        for index, datum in enumerate(make_data((1, 9, 4, 4, 2, 3)))
    ]
    for budget in (1, 20, 1000):
        seen.clear()
        session = open_backend(micro_batch_tokens=budget).open_session(
            "a", make_lora(), directory=tmp_path
        )
        session.forward_backward(rows, loss, rows_per_unit=2).result()
        flat = [pair for batch in seen for pair in batch]
        assert sorted(flat) == [0, 1, 2, 3, 4, 5]
        for batch in seen:
            assert len(batch) % 2 == 0
            assert all(
                b == a + 1 and a % 2 == 0 for a, b in zip(batch[::2], batch[1::2], strict=True)
            )
    with pytest.raises(BackendError, match="units of 4"):
        session.forward_backward(rows, loss, rows_per_unit=4).result()


def test_rows_alone_equal_rows_together(open_backend, tmp_path) -> None:
    """Case 125: rows of 3 and 5 tokens: NLL together = NLL of each alone; padding never matters."""
    rows = [Datum(np.array([5, 6, 7], np.int32)), Datum(np.array([9, 8, 7, 6, 5], np.int32))]
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    together = session.forward(rows).result()
    alone = [session.forward([row]).result()[0] for row in rows]
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert float(sum(t.sum() for t in together)) == pytest.approx(
        float(sum(t.sum() for t in alone)), abs=1e-4
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_loss_is_refused(open_backend, tmp_path, bad: float) -> None:
    """Case 8: nothing applied, the gradient of earlier rows dropped, later steps refused."""

    def loss(logprobs, *, token_weights):
        return (logprobs * token_weights).sum() * bad, {}

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    before = parameters_of(session)
    session.forward_backward(make_data(), cross_entropy)
    failed = session.forward_backward(make_data(), loss)
    step = session.optim_step(make_adam())
    with pytest.raises(NonFiniteError, match="step 1: the loss is"):
        failed.result()
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="refuses optim_step: its forward_backward failed"):
            step.result()
        step = session.optim_step(make_adam())
    for name, value in parameters_of(session).items():
        assert torch.equal(value, before[name])
        assert session._weights.parameters[name].grad is None


def test_a_non_finite_gradient_is_refused(open_backend, tmp_path) -> None:
    """Case 8: a finite loss with an infinite gradient at step 2; the adapter stays as after 1."""

    def loss(logprobs, *, token_weights):
        # sqrt has an infinite slope at 0, and the value is 0.
        return ((logprobs - logprobs.detach()) * token_weights).sum().abs().sqrt(), {}

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam()).result()
    before = parameters_of(session)
    assert session.forward_backward(make_data(), loss).result()["loss"] == 0
    with pytest.raises(NonFiniteError, match="step 2: the gradient norm is nan"):
        session.optim_step(make_adam()).result()
    with pytest.raises(NonFiniteError, match="refuses optim_step"):
        session.optim_step(make_adam()).result()
    for name, value in parameters_of(session).items():
        assert torch.equal(value, before[name])


def test_adamw_is_the_textbook_step(open_backend, tmp_path) -> None:
    """First step: m/(1-b1) = g and v/(1-b2) = g^2, so p' = p (1 - lr wd) - lr g / (|g| + eps)."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(make_data(), cross_entropy).result()
    before, gradients = parameters_of(session), gradients_of(session)
    session.optim_step(make_adam(learning_rate=0.1, weight_decay=0.5, eps=1e-4)).result()
    for name, value in parameters_of(session).items():
        gradient = gradients[name]
        expected = before[name] * (1 - 0.1 * 0.5) - 0.1 * gradient / (gradient.abs() + 1e-4)
        assert torch.allclose(value, expected, atol=1e-6)


def test_adamw_moments_follow_the_betas_of_each_step(open_backend, tmp_path) -> None:
    """Three steps against the formula, with the betas 0.5 and 0.8."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    expected = {name: value.double() for name, value in parameters_of(session).items()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 4):
        session.forward_backward(make_data(seed=step), cross_entropy).result()
        for name, gradient in gradients_of(session).items():
            first[name] = 0.5 * first[name] + 0.5 * gradient.double()
            second[name] = 0.8 * second[name] + 0.2 * gradient.double() ** 2
            mean, square = first[name] / (1 - 0.5**step), second[name] / (1 - 0.8**step)
            expected[name] = expected[name] - 0.01 * mean / (square.sqrt() + 1e-3)
        session.optim_step(make_adam(beta1=0.5, beta2=0.8, eps=1e-3)).result()
    for name, value in parameters_of(session).items():
        assert torch.allclose(value.double(), expected[name], rtol=0, atol=1e-6)


def test_every_setting_is_taken_at_every_step(open_backend, tmp_path) -> None:
    """A rate of 0 at the second step leaves the weights alone."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=0.1)).result()
    before = parameters_of(session)
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=0.0, weight_decay=0.3, beta1=0.5)).result()
    for name, value in parameters_of(session).items():
        assert torch.equal(value, before[name])


def test_clipping_scales_to_the_norm_and_reports_the_norm_before(open_backend, tmp_path) -> None:
    """With eps far above the gradient the step is lr g / eps, so a clip to half is half a step."""
    changes = []
    for share in (0.0, 0.5):
        session = open_backend().open_session("a", make_lora(), directory=tmp_path)
        session.forward_backward(make_data(), cross_entropy).result()
        before, gradients = parameters_of(session), gradients_of(session)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        params = make_adam(learning_rate=1e5, eps=1e6, max_grad_norm=share * norm)
        assert session.optim_step(params).result()["grad_norm"] == pytest.approx(norm, rel=1e-5)
        changes.append({n: v - before[n] for n, v in parameters_of(session).items()})
    for name, change in changes[0].items():
        assert torch.allclose(changes[1][name], change / 2, atol=1e-6)


def test_a_step_without_gradient_is_refused(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(BackendError, match="without a forward_backward"):
        session.optim_step(make_adam()).result()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate=-1"),
        ({"beta2": 1.0}, "optimizer.beta2=1"),
        ({"eps": math.nan}, "optimizer.eps=nan"),
        ({"max_grad_norm": -1.0}, "optimizer.max_grad_norm=-1"),
    ],
)
def test_bad_optimizer_values_name_the_key(open_backend, tmp_path, changes, key: str) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(make_data(), cross_entropy)
    with pytest.raises(ConfigError, match=key):
        session.optim_step(make_adam(**changes)).result()


def test_rows_without_weight_give_no_gradient(open_backend, tmp_path) -> None:
    """A batch in which nothing is supervised has loss 0 and changes nothing."""
    data = [
        Datum(d.tokens, {"token_weights": np.zeros(d.num_scored, np.float32)}) for d in make_data()
    ]
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    before = parameters_of(session)
    assert session.forward_backward(data, cross_entropy).result() == {
        "loss": 0.0,
        "num_tokens": 0.0,
    }
    assert session.optim_step(make_adam()).result()["grad_norm"] == 0.0
    for name, value in parameters_of(session).items():
        assert torch.equal(value, before[name])


def test_a_loss_without_gradient_is_an_error(open_backend, tmp_path) -> None:
    def loss(logprobs, *, token_weights):
        return (logprobs.detach() * token_weights).sum(), {}

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(BackendError, match="does not depend on the log-probs"):
        session.forward_backward(make_data(), loss).result()


CONTRACT = (
    "a loss must return `(loss, metrics)`: a scalar floating-point tensor, and a mapping of names, "
    "other than 'loss', to scalars. Both are sums over the rows it was given"
)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss, "a tensor (float32, shape [])"),
        (lambda loss: (loss,), "a tuple of 1"),
        (lambda loss: [loss, {}], "a list of 2"),
        (lambda loss: None, "None"),
        (lambda loss: (loss[None], {}), "a tensor (float32, shape [1]) as its loss"),
        (lambda loss: (loss.long(), {}), "a tensor (int64, shape []) as its loss"),
        (lambda loss: (loss.item(), {}), "a float as its loss"),
        (lambda loss: (loss, None), "None as its metrics"),
        (lambda loss: (loss, loss), "a tensor (float32, shape []) as its metrics"),
        (lambda loss: (loss, {"x": torch.zeros(2)}), "a tensor (float32, shape [2]) as its metric 'x'"),
        (lambda loss: (loss, {"x": "1"}), "a str as its metric 'x'"),
        (lambda loss: (loss, {"loss": loss}), "a tensor (float32, shape []) as its metric 'loss'"),
    ],
)  # fmt: skip
def test_a_loss_that_returns_something_else_is_told_what(
    open_backend, tmp_path, returned, message
) -> None:
    def my_loss(logprobs, *, token_weights, scale):
        return returned((logprobs * token_weights).sum() * scale)

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(ConfigError) as caught:
        session.forward_backward(make_data(), functools.partial(my_loss, scale=2.0)).result()
    assert str(caught.value) == f"loss 'my_loss' returned {message}; {CONTRACT}"


def test_a_loss_may_have_another_dtype_and_plain_metrics(open_backend, tmp_path) -> None:
    def double(logprobs, *, token_weights):
        loss, metrics = cross_entropy(logprobs.double(), token_weights=token_weights)
        return loss, {**metrics, "plain": 1, "with_gradient": loss, "one": torch.ones(1)}

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    expected = session.forward_backward(make_data(), cross_entropy).result()
    found = session.forward_backward(make_data(), double).result()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["with_gradient"] == found["loss"]
    assert found["num_tokens"] == expected["num_tokens"] == 16
    assert found["plain"] == found["one"] == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1] * 300, "299 tokens, .* takes 256"), ([1, VOCAB_SIZE], "outside 0..127")],
)
def test_rows_that_do_not_fit_the_model(open_backend, tmp_path, tokens, message: str) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(BackendError, match=message):
        session.forward([Datum(np.array(tokens, np.int32))]).result()


def test_muon_needs_full_weights(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(make_data(), cross_entropy)
    with pytest.raises(BackendError, match="muon needs full weights"):
        session.optim_step(make_muon()).result()


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_hidden_matrices_and_adamw_the_rest(open_backend, tiny, tmp_path, tied) -> None:
    """A matrix moves by about lr 0.2 sqrt(max side) x orthogonal; the others by lr x sign(g)."""
    backend = open_backend(model=tiny.tied if tied else tiny.untied)
    session = backend.open_session("a", None, directory=tmp_path)
    assert session.trainable_parameters == sum(p.numel() for p in session._base.model.parameters())
    before = parameters_of(session)
    loss = session.forward_backward(make_data(), cross_entropy).result()["loss"]
    session.optim_step(make_muon(learning_rate=0.01, adam=make_adam(learning_rate=0.001))).result()
    for name, value in parameters_of(session).items():
        change = value - before[name]
        if "_proj" in name:
            rms = float(change.square().mean().sqrt())
            assert 0.2 * 0.01 * 0.6 < rms < 0.2 * 0.01 * 1.4, name
        else:
            assert 0 < change.abs().max() <= 0.001 * 1.01, name
    after = session.forward_backward(make_data(), cross_entropy).result()["loss"]
    assert after < loss
    with pytest.raises(BackendError, match="trains with muon and cannot go on with adamw"):
        session.optim_step(make_adam()).result()


def test_full_weights_in_bfloat16_keep_float32_masters(open_backend, tmp_path) -> None:
    """A step far below bfloat16's resolution still arrives."""
    backend = open_backend(dtype="bfloat16")
    session = backend.open_session("a", None, directory=tmp_path)
    before = parameters_of(session)
    assert math.isfinite(session.forward_backward(make_data(), cross_entropy).result()["loss"])
    session.optim_step(make_adam(learning_rate=1e-6)).result()
    name = "model.layers.0.mlp.up_proj.weight"
    change = (parameters_of(session)[name] - before[name]).abs()
    assert parameters_of(session)[name].dtype == torch.float32
    assert 0 < change.max() < 1e-5


def test_bfloat16_adapter_is_close_to_float32(open_backend, tmp_path) -> None:
    losses = [
        open_backend(dtype=dtype)
        .open_session("a", make_lora(), directory=tmp_path)
        .forward_backward(make_data(), cross_entropy)
        .result()["loss"]
        for dtype in ("float32", "bfloat16")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0] != losses[1]


def test_closing_full_weights_gives_the_base_back(open_backend, tmp_path) -> None:
    """Full-weight training changes the base, so the next session begins from a fresh one."""
    backend, data = open_backend(), make_data()
    first = backend.open_session("a", make_lora(), directory=tmp_path)
    expected = first.forward(data).result()
    first.close()
    full = backend.open_session("b", None, directory=tmp_path)
    full.forward_backward(data, cross_entropy)
    full.optim_step(make_adam()).result()
    with pytest.raises(BackendError, match="needs it alone"):
        backend.open_session("c", make_lora(), directory=tmp_path)
    full.close()
    again = backend.open_session("c", make_lora(), directory=tmp_path)
    with pytest.raises(BackendError, match="needs it alone"):
        backend.open_session("d", None, directory=tmp_path)
    for ours, theirs in zip(again.forward(data).result(), expected, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
