"""Sampling on the fast path: what the model's own code gives, whoever shares the batch."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fns.cross_entropy import cross_entropy
from tests.backends.engine.families import FAMILIES, write_family
from tests.backends.engine.test_engine import spread
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.local.engine import batching, decode
from tunebook.types import Datum, StopReason

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(3, 120, length).tolist() for length in (5, 1, 40, 17, 2)]


def open_session(open_backend, tmp_path, name="a", *, seed=5, **settings):
    session = open_backend(**settings).open_session(name, make_lora(), directory=tmp_path / name)
    spread(session, seed=seed)
    return session


def sample(session, prompts=PROMPTS, num_samples=1, **changes):
    generator = session.publish_weights().result()
    return generator.sample(prompts, make_sampling(**changes), num_samples).result()


def tokens_of(samples):
    return [[completion.tokens.tolist() for completion in group] for group in samples]


def flat(samples):
    return [completion for group in samples for completion in group]


def check_equal(ours, theirs, *, atol=1e-5):
    """The same tokens, and log-probs to rounding."""
    assert tokens_of(ours) == tokens_of(theirs)
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol)
        assert one.stop_reason is other.stop_reason


@pytest.fixture(params=["apart", "shared"])
def beginnings(request, monkeypatch):
    """Prompts kept with each row, or once for all rows of a group."""
    least = 1 if request.param == "shared" else 10**9
    monkeypatch.setattr(batching, "MIN_SHARED_TOKENS", least)


@pytest.mark.usefixtures("beginnings")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_greedy(open_backend, tmp_path, family) -> None:
    """Windows shorter than the texts, soft caps and norms included."""
    name = write_family(tmp_path / "model", family)
    session = open_backend(model=name).open_session("a", make_lora(), directory=tmp_path)
    assert session._engine is not None
    reference = AutoModelForCausalLM.from_pretrained(name).eval()
    reference.generation_config.eos_token_id = [2]
    samples = sample(session, num_samples=2, temperature=0.0, max_tokens=30)
    for prompt, completions in zip(PROMPTS, samples, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )
        for completion in completions:
            assert completion.tokens.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.usefixtures("beginnings")
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_forward(open_backend, tmp_path, family) -> None:
    name = write_family(tmp_path / "model", family)
    session = open_session(open_backend, tmp_path, model=name)
    samples = sample(session, num_samples=3, max_tokens=40)
    rows = [
        Datum(np.concatenate([prompt, completion.tokens]).astype(np.int32))
        for prompt, completions in zip(PROMPTS, samples, strict=True)
        for completion in completions
    ]
    for completion, scored in zip(flat(samples), session.forward(rows).result(), strict=True):
        theirs = scored.numpy()[-len(completion.tokens) :]
        np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral with a window"])
def test_both_paths_draw_the_same(open_backend, tmp_path, family) -> None:
    name = write_family(tmp_path / "model", family)
    found = [
        sample(
            open_session(open_backend, tmp_path, model=name, fast=fast),
            num_samples=3,
            max_tokens=20,
            top_p=0.9,
            top_k=50,
            temperature=0.7,
        )
        for fast in (True, False)
    ]
    check_equal(*found, atol=1e-4)


@pytest.mark.parametrize("limit", [1, 2, 5, 7])
def test_the_limit_of_rows_does_not_matter(open_backend, tmp_path, monkeypatch, limit) -> None:
    """Rows of unequal length leave, and those that wait take their slots."""
    session = open_session(open_backend, tmp_path)
    uneven = partial(sample, session, num_samples=4, max_tokens=25, stop=tuple(range(100, 115)))
    free = uneven()
    assert len({len(c.tokens) for c in flat(free)}) > 3
    counts = []
    run = decode.decode

    def counted(own, lineup, tokens, lengths):
        counts.append(len(tokens))
        return run(own, lineup, tokens, lengths)

    monkeypatch.setattr(batching, "decode", counted)
    monkeypatch.setattr(batching, "MAX_ROWS", limit)
    check_equal(uneven(), free)
    assert max(counts) == limit
    # With rows entering at once, steps are not much more than rows would take one after another.
    assert len(counts) <= sum(counts) / limit + 25


def test_the_memory_for_keys_limits_rows(open_backend, tmp_path, monkeypatch) -> None:
    session = open_session(open_backend, tmp_path)
    free = sample(session, num_samples=4)
    monkeypatch.setattr(batching, "CACHE_BYTES_PER_TOKEN", 1)
    check_equal(sample(session, num_samples=4), free)


def test_a_prompt_is_read_once(open_backend, tmp_path, monkeypatch) -> None:
    """Whatever the number of its completions, and however often it is named."""
    session = open_session(open_backend, tmp_path)
    lengths = []
    run = decode.prefill

    def counted(decoder, prompts):
        lengths.extend(len(prompt.tokens) for prompt in prompts)
        return run(decoder, prompts)

    monkeypatch.setattr(batching, "prefill", counted)
    monkeypatch.setattr(batching, "MAX_ROWS", 3)
    sample(session, prompts=[*PROMPTS, PROMPTS[2]], num_samples=6)
    assert sorted(lengths) == sorted(len(prompt) for prompt in PROMPTS)


def test_sessions_meet_and_settings_may_differ(open_backend, tmp_path, monkeypatch) -> None:
    """Three adapters with settings of their own in one batch: each as alone."""
    backend = open_backend()
    settings = (
        {"seed": 1, "max_tokens": 12},
        {"seed": 2, "temperature": 0.0, "max_tokens": 20},
        {"seed": 3, "temperature": 1.5, "top_k": 20, "top_p": 0.8, "stop": ("A", 40)},
    )
    generators = []
    for seed in range(3):
        name = f"s{seed}"
        session = backend.open_session(name, make_lora(), directory=tmp_path / name)
        spread(session, seed=seed)
        generators.append(session.publish_weights().result())
    ask = [
        partial(generator.sample, PROMPTS, make_sampling(**changes), 3)
        for generator, changes in zip(generators, settings, strict=True)
    ]
    alone = [one().result() for one in ask]
    batches = []
    make = batching.Batch.__init__

    def counted(self, engine, requests, **more):
        batches.append(len(requests))
        make(self, engine, requests, **more)

    monkeypatch.setattr(batching.Batch, "__init__", counted)
    futures = [one() for one in ask]
    for future, expected in zip(futures, alone, strict=True):
        check_equal(future.result(), expected)
    assert batches == [3]
    assert tokens_of(alone[0]) != tokens_of(alone[1])


def test_two_requests_of_a_session_keep_their_order(open_backend, tmp_path) -> None:
    """What a session queues between them takes effect between them."""
    session = open_session(open_backend, tmp_path)
    generator = session.publish_weights().result()
    first = generator.sample(PROMPTS, make_sampling(), 2)
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=0.1))
    second = generator.sample(PROMPTS, make_sampling(), 2)
    check_equal(second.result(), first.result())


def test_a_failure_concerns_its_own_request(open_backend, tmp_path) -> None:
    backend = open_backend()
    one, other = (
        backend.open_session(name, make_lora(), directory=tmp_path / name) for name in "ab"
    )
    generators = [session.publish_weights().result() for session in (one, other)]
    bad = generators[0].sample([[]], make_sampling(), 1)
    good = generators[1].sample(PROMPTS, make_sampling(), 1)
    assert len(good.result()) == len(PROMPTS)
    with pytest.raises(Exception, match="prompt 0 is empty"):
        bad.result()
    assert len(generators[0].sample(PROMPTS, make_sampling(), 1).result()) == len(PROMPTS)


def test_an_interrupt_leaves_the_session_usable(open_backend, tmp_path, monkeypatch) -> None:
    session = open_session(open_backend, tmp_path)
    expected = sample(session)
    run, count = decode.decode, 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(batching, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(session)
    check_equal(sample(session), expected)
    session.forward_backward(make_data(), cross_entropy).result()
    session.optim_step(make_adam()).result()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("stop", [(), ("e",)])
def test_a_stream_is_the_sample_piece_by_piece(open_backend, tmp_path, fast, stop) -> None:
    session = open_session(open_backend, tmp_path, fast=fast)
    params = make_sampling(max_tokens=30, stop=stop)
    generator = session.publish_weights().result()
    expected = generator.sample([PROMPTS[0]], params, 1).result()[0][0]
    pieces = list(generator.stream(PROMPTS[0], params))
    assert sum((piece.tokens for piece in pieces), ()) == tuple(expected.tokens)
    assert all(len(piece.tokens) == 1 for piece in pieces)
    tokenizer = session._settings.load_tokenizer()
    whole = tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert "".join(piece.text for piece in pieces) == whole
    last = pieces[-1].completion
    assert last is not None and all(piece.completion is None for piece in pieces[:-1])
    assert last.tokens.tolist() == expected.tokens.tolist()
    assert last.stop_reason is expected.stop_reason
    np.testing.assert_allclose(last.logprobs, expected.logprobs, atol=1e-5)


def test_a_stream_may_be_left_and_outlives_training(open_backend, tmp_path) -> None:
    session = open_session(open_backend, tmp_path)
    params = make_sampling(temperature=0.0, max_tokens=20)
    generator = session.publish_weights().result()
    expected = [piece.tokens for piece in generator.stream(PROMPTS[0], params)]
    stream = generator.stream(PROMPTS[0], params)
    found = [next(stream).tokens]
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=0.1)).result()
    found += [piece.tokens for piece in stream]
    assert found == expected
    next(generator.stream(PROMPTS[0], params))
    assert sample(session, max_tokens=1)[0][0].stop_reason is StopReason.LENGTH


def test_long_answers_outgrow_their_first_room(open_backend, tmp_path) -> None:
    """Beyond a piece of own tokens, in a batch with short ones."""
    session = open_session(open_backend, tmp_path)
    samples = sample(session, temperature=0.0, max_tokens=3 * decode.PIECE, stop=())
    assert max(len(c.tokens) for c in flat(samples)) > decode.PIECE
    for prompt, (completion,) in zip(PROMPTS, samples, strict=True):
        row = Datum(np.concatenate([prompt, completion.tokens]).astype(np.int32))
        theirs = session.forward([row]).result()[0].numpy()[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4)


def test_top_p_looks_at_all_tokens_where_it_must(monkeypatch) -> None:
    """The first candidates of a flat distribution do not reach top-p."""
    from tunebook.backends.local import completions

    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    whole = completions.sampling_logprobs(logits, temperature=1.0, top_k=0, top_p=0.9)
    monkeypatch.setattr(completions, "TOP_P_CANDIDATES", 8)
    few = completions.sampling_logprobs(logits, temperature=1.0, top_k=0, top_p=0.9)
    assert torch.equal(whole, few)
    assert ((whole > -torch.inf).sum(dim=1) > 8).all()


def test_bfloat16_draws_do_not_depend_on_the_batch(open_backend, tmp_path) -> None:
    """Products of bfloat16 round a lot, but each row as if it were alone."""
    session = open_session(open_backend, tmp_path, dtype="bfloat16")
    together = sample(session, num_samples=3, max_tokens=20)
    alone = [sample(session, prompts=[PROMPTS[0]], num_samples=3, max_tokens=20)[0]]
    assert tokens_of(together[:1]) == tokens_of(alone)
