"""The fast path computes what the model's own code computes, whoever shares the stream."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loss_fns.cross_entropy import cross_entropy
from tests.backends.engine.families import FAMILIES, SIZES, write_family
from tests.backends.tiny import character_tokenizer, make_adam, make_lora
from tunebook.backends.local.engine.engine import agrees
from tunebook.backends.local.engine.layout import groups_of
from tunebook.types import Datum

BEGINNING = 18
"""Tokens that rows of a group share; enough to be computed once."""


def rows_of(lengths, *, seed=0, beginning=BEGINNING, shared=2):
    """Rows of these lengths; every `shared` consecutive ones begin alike. Part carries weight."""
    random = np.random.default_rng(seed)
    rows = []
    prompt = None
    for number, length in enumerate(lengths):
        if number % shared == 0:
            prompt = random.integers(3, 120, beginning)
        own = random.integers(3, 120, length - beginning)
        weights = random.random(length - 1).astype(np.float32)
        weights[: beginning // 2] = 0
        rows.append(
            Datum(
                np.concatenate([prompt, own]).astype(np.int32),
                {"token_weights": weights / len(lengths)},
            )
        )
    return rows


LENGTHS = (40, 25, 61, 19, 33, 33)


def spread(session, *, seed=5):
    """Adapter values that are not 0 anywhere, so that every product has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in session._weights.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def trained(session, rows, *, loss_fn=cross_entropy, rows_per_unit=1):
    """Loss, log-probs and gradient of one operation."""
    logprobs = session.forward(rows).result()
    metrics = session.forward_backward(rows, loss_fn, rows_per_unit=rows_per_unit).result()
    gradient = {name: p.grad.clone() for name, p in session._weights.parameters.items()}
    return metrics["loss"], logprobs, gradient


def check_equal(ours, theirs, *, tolerance=2e-6):
    """The same loss, log-probs and gradient, relative to the largest of each parameter's."""
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5, equal_nan=True)
    for name, gradient in theirs[2].items():
        largest = float(gradient.abs().max())
        assert largest > 0
        error = float((ours[2][name] - gradient).abs().max())
        assert error <= 10 * tolerance * largest, f"{name}: {error / largest:.1e}"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("family"), request.param)


def test_every_family_equals_its_own_code(open_backend, tmp_path, family):
    """Loss, log-probs and every adapter gradient, with shared beginnings, windows and caps."""
    results = []
    for fast in (True, False):
        session = open_backend(model=family, fast=fast).open_session(
            "a", make_lora(), directory=tmp_path
        )
        assert (session._engine is not None) == fast
        spread(session)
        results.append(trained(session, rows_of(LENGTHS)))
    check_equal(*results)


def test_temperatures_are_those_of_the_models_own_code(open_backend, tmp_path, family):
    """Case 68: rows of several temperatures in one stream, log-probs and every gradient."""
    rows = [
        Datum(row.tokens, {**row.columns, **({"temperature": value} if value != 1 else {})})
        for row, value in zip(rows_of(LENGTHS), (0.5, 1.0, 2.0, 0.5, 1.0, 0.7), strict=True)
    ]
    results = []
    for fast in (True, False):
        session = open_backend(model=family, fast=fast).open_session(
            "a", make_lora(), directory=tmp_path
        )
        spread(session)
        results.append(trained(session, rows))
    check_equal(*results)
    # Without it, the rows of temperature 1 stay as they are and no other one does.
    plain = session.forward(rows_of(LENGTHS)).result()
    for row, ours, theirs in zip(rows, results[0][1], plain, strict=True):
        same = torch.allclose(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)
        assert same == ("temperature" not in row.columns)


@pytest.mark.parametrize("name", ["q_norm", "rotary", "gate"])
def test_a_decoder_that_differs_is_found_out(open_backend, tmp_path, name):
    """A model whose code does something else is left to its own code."""
    folder = write_family(tmp_path / "model", "qwen3")
    base = open_backend(model=folder).open_session("a", make_lora(), directory=tmp_path)._base
    session_engine = (
        open_backend(model=folder).open_session("b", make_lora(), directory=tmp_path)._engine
    )
    decoder = session_engine.decoder
    assert agrees(base.model, base.body, decoder)
    layer = base.body.layers[1]
    changed = {
        "q_norm": layer.self_attn.q_norm.weight,
        "rotary": base.body.rotary_emb.inv_freq,
        "gate": layer.mlp.gate_proj.weight,
    }[name]
    with torch.no_grad():
        changed.mul_(1.01)
    assert not agrees(base.model, base.body, decoder)


def test_recomputation_changes_nothing(open_backend, tmp_path):
    """What is kept for the backward pass does not matter: the same bits."""
    results = []
    for recompute in (True, False):
        session = open_backend().open_session("a", make_lora(), directory=tmp_path)
        session._engine.recompute = recompute
        spread(session)
        results.append(trained(session, rows_of(LENGTHS)))
    check_equal(*results, tolerance=0)


def test_a_shared_beginning_is_computed_once(open_backend, tmp_path):
    """Three pairs that share 18 tokens: 3 x 18 tokens less than the rows have."""
    rows = rows_of(LENGTHS)
    inputs = [datum.tokens[:-1] for datum in rows]
    groups = groups_of(inputs, rows_per_unit=2, max_tokens=1000, share=True)
    assert [group.prefix for group in groups] == [18, 18, 18]
    assert sum(group.num_tokens for group in groups) == sum(LENGTHS) - 6 - 3 * 18


def test_sharing_a_beginning_is_exact(open_backend, tmp_path, monkeypatch):
    """Groups of three, a row that is nothing but the beginning, against no sharing at all."""
    lengths = (40, 25, 19, 61, 33, 33)
    results = []
    for share in (True, False):
        if not share:
            monkeypatch.setattr("tunebook.backends.local.engine.layout.MIN_PREFIX", 10_000)
            monkeypatch.setattr(
                "tunebook.backends.local.engine.engine.groups_of",
                partial(groups_of, min_prefix=10_000),
            )
        session = open_backend().open_session("a", make_lora(), directory=tmp_path)
        spread(session)
        results.append(trained(session, rows_of(lengths, shared=3)))
    check_equal(*results)


ADAPTERS = {
    "plain": make_lora(),
    "wide": make_lora(rank=7, alpha=3.0, seed=1),
    "attention only": make_lora(rank=2, alpha=8.0, target_modules=("q_proj", "v_proj"), seed=2),
    "one layer's end": make_lora(rank=3, rslora=True, target_modules=("down_proj",), seed=3),
}


def test_sessions_that_share_a_stream_equal_each_alone(open_backend, tmp_path):
    """Mixed ranks, alphas and targets in one batch: bit for bit what each session gets alone.

    Case 4: 2 rows beside 30, one step.
    """
    data = {name: rows_of(LENGTHS[: 2 + 2 * n], seed=n) for n, name in enumerate(ADAPTERS)}
    data["wide"] = rows_of((30,) * 30, seed=9)

    def run(names, *, fast=True):
        backend = open_backend(fast=fast)
        sessions = {
            name: backend.open_session(name, ADAPTERS[name], directory=tmp_path) for name in names
        }
        for name, session in sessions.items():
            spread(session, seed=len(name))
        pending = []
        for _ in range(3):
            for name, session in sessions.items():
                pending.append(session.forward_backward(data[name], cross_entropy))
            for session in sessions.values():
                pending.append(session.optim_step(make_adam()))
        results = [future.result() for future in pending]
        found = {}
        for number, (name, session) in enumerate(sessions.items()):
            logprobs = session.forward(data[name][:1]).result()[0]
            weights = {k: v.detach().clone() for k, v in session._weights.parameters.items()}
            found[name] = (results[number :: len(sessions)], logprobs, weights)
        return found

    together = run(ADAPTERS)
    for name in ADAPTERS:
        (alone,) = run([name]).values()
        assert together[name][0] == alone[0]
        assert together[name][1].equal(alone[1]) or torch.equal(
            together[name][1].nan_to_num(), alone[1].nan_to_num()
        )
        for key, value in alone[2].items():
            torch.testing.assert_close(together[name][2][key], value, rtol=0, atol=1e-6)


def test_queued_operations_meet_in_one_run(open_backend, tmp_path, monkeypatch):
    """Four sessions queue a step each: one run of the base over all of it, not four."""
    backend = open_backend()
    sessions = [
        backend.open_session(str(n), make_lora(seed=n), directory=tmp_path) for n in range(4)
    ]
    engine = sessions[0]._engine
    runs = []
    real_run = engine.run
    monkeypatch.setattr(
        engine, "run", lambda jobs, **given: (runs.append(len(jobs)), real_run(jobs, **given))
    )
    futures = [s.forward_backward(rows_of(LENGTHS, seed=n), cross_entropy) for n, s in
               enumerate(sessions)]  # fmt: skip
    steps = [s.optim_step(make_adam()) for s in sessions]
    steps[-1].result()
    assert runs == [4]
    assert all(future.done for future in futures)


def test_one_session_s_failure_leaves_the_others_alone(open_backend, tmp_path):
    """A loss that raises, a row that does not fit: their owners hear of it, nobody else."""
    backend = open_backend()
    good, bad, unfit = (
        backend.open_session(name, make_lora(), directory=tmp_path) for name in "abc"
    )

    def broken(logprobs, *, token_weights):
        raise ZeroDivisionError("mine")

    alone = open_backend().open_session("alone", make_lora(), directory=tmp_path)
    for session in (good, alone):
        spread(session)
    rows = rows_of(LENGTHS)
    futures = [
        bad.forward_backward(rows, broken),
        good.forward_backward(rows, cross_entropy),
        unfit.forward_backward([Datum(np.full(999, 5, np.int32))], cross_entropy),
    ]
    assert futures[1].result() == alone.forward_backward(rows, cross_entropy).result()
    with pytest.raises(ZeroDivisionError, match="mine"):
        futures[0].result()
    with pytest.raises(Exception, match="998 tokens"):
        futures[2].result()
    good.optim_step(make_adam()).result()
    with pytest.raises(Exception, match="refuses forward"):
        bad.forward(rows).result()


def test_bfloat16_is_close_to_float32(open_backend, tmp_path):
    """Gradient error of a few percent, as rounding to 8 bits gives."""
    gradients = []
    for dtype in ("float32", "bfloat16"):
        session = open_backend(dtype=dtype).open_session("a", make_lora(), directory=tmp_path)
        assert session._engine is not None
        spread(session)
        gradient = trained(session, rows_of(LENGTHS))[2]
        gradients.append(torch.cat([each.flatten() for each in gradient.values()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < 0.05


@pytest.mark.parametrize("weights", ["zero advantages", "zero token weights"])
def test_a_gradient_of_zero_is_the_same_alone_and_in_company(open_backend, tmp_path, weights):
    """Equal rewards in every group: momentum moves the weights. No weights: nobody moves.

    The step is that of the general path, whoever shares the stream.
    """
    rows = rows_of(LENGTHS)
    still = [Datum(row.tokens, dict(row.columns)) for row in rows]
    if weights == "zero token weights":
        still = [
            Datum(row.tokens, {"token_weights": np.zeros_like(row.columns["token_weights"])})
            for row in rows
        ]

    def flat(logprobs, *, token_weights):
        return -(logprobs * token_weights).sum() * 0.0, {}

    moved = []
    for fast, company in ((False, False), (True, False), (True, True)):
        backend = open_backend(fast=fast)
        session = backend.open_session("a", make_lora(), directory=tmp_path)
        spread(session)
        session.forward_backward(rows, cross_entropy)
        session.optim_step(make_adam()).result()
        before = [p.detach().clone() for p in session._weights.parameters.values()]
        if company:
            other = backend.open_session("b", make_lora(), directory=tmp_path)
            other.forward_backward(rows_of(LENGTHS, seed=4), cross_entropy)
        session.forward_backward(still, flat)
        session.optim_step(make_adam()).result()
        after = list(session._weights.parameters.values())
        moved.append(
            max(float((x - y.detach()).abs().max()) for x, y in zip(before, after, strict=True))
        )
    assert moved[1] == moved[2] == pytest.approx(moved[0], rel=1e-3)
    assert (moved[0] > 1e-4) == (weights == "zero advantages")


def test_a_loss_may_write_into_its_log_probs(open_backend, tmp_path):
    def in_place(logprobs, *, token_weights):
        logprobs *= token_weights
        return -logprobs.sum(), {}

    results = []
    for loss_fn in (in_place, cross_entropy):
        session = open_backend().open_session("a", make_lora(), directory=tmp_path)
        spread(session)
        results.append(trained(session, rows_of(LENGTHS), loss_fn=loss_fn))
    check_equal(*results)


def test_a_loss_with_a_graph_of_its_own_is_told(open_backend, tmp_path):
    def elsewhere(logprobs, *, token_weights):
        return torch.ones((), requires_grad=True) * 2, {}

    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    with pytest.raises(Exception, match="does not depend on the log-probs"):
        session.forward_backward(rows_of(LENGTHS), elsewhere).result()


def test_a_loss_cannot_wait_for_itself(open_backend, tmp_path):
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    futures = []

    def waiting(logprobs, *, token_weights):
        return futures[0].result()

    futures.append(session.forward_backward(rows_of(LENGTHS), waiting))
    with pytest.raises(Exception, match="cannot wait for its own result"):
        futures[0].result()


def test_no_rows_on_a_model_with_a_window(open_backend, tmp_path):
    folder = write_family(tmp_path / "model", "mistral with a window")
    session = open_backend(model=folder).open_session("a", make_lora(), directory=tmp_path)
    assert session.forward([]).result() == []


def test_angles_that_depend_on_the_longest_row_are_not_shared(open_backend, tmp_path):
    """longrope takes other factors for a whole batch once one of its rows is long."""
    config = LlamaConfig(
        **{**SIZES, "max_position_embeddings": 256},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    session = open_backend(model=str(tmp_path / "model")).open_session(
        "a", make_lora(), directory=tmp_path
    )
    assert session._engine is None and not session._base.streams
