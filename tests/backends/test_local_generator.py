"""Sampling: greedy as transformers does it, exact log-probs, seeds, stops, versions."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_training import gradients_of, parameters_of
from tests.backends.tiny import (
    EOS,
    VOCAB_SIZE,
    character_tokenizer,
    make_adam,
    make_data,
    make_lora,
    make_sampling,
)
from tunebook.backends.local.completions import LARGEST_DRAW, draw, ends, sampling_logprobs
from tunebook.errors import BackendError, ConfigError, NonFiniteError, StaleGenerator
from tunebook.types import Datum, StopReason

PROMPTS = [[10, 11, 12, 13, 14], [50], [70, 60], [33, 44, 55]]


@pytest.fixture
def session(open_backend, tmp_path):
    """A session whose adapter has been trained a little, so that it matters."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    for _ in range(3):
        session.forward_backward(make_data(), cross_entropy)
        session.optim_step(make_adam(learning_rate=0.05)).result()
    return session


def sample(session, prompts=PROMPTS, num_samples=1, **changes):
    generator = session.publish_weights().result()
    return generator.sample(prompts, make_sampling(**changes), num_samples).result()


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_greedy_is_transformers_greedy(open_backend, tiny, tmp_path, model: str) -> None:
    """Token for token, in a batch of prompts of unequal length."""
    name = getattr(tiny, model)
    session = open_backend(model=name).open_session("a", make_lora(), directory=tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(name).eval()
    samples = sample(session, temperature=0.0, max_tokens=30)
    for prompt, completions in zip(PROMPTS, samples, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )
        assert completions[0].tokens.tolist() == theirs[0, len(prompt) :].tolist()


def test_positions_start_at_0_for_every_prompt_of_a_batch(open_backend, tmp_path) -> None:
    """GPT-2 has absolute positions, so shorter prompts must not count their padding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    session = open_backend(model=str(tmp_path / "model")).open_session(
        "a", make_lora(), directory=tmp_path
    )
    together = sample(session, temperature=0.0)
    for prompt, completions in zip(PROMPTS, together, strict=True):
        alone = sample(session, prompts=[prompt], temperature=0.0)[0][0]
        assert completions[0].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(completions[0].logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "model"),
    # GPT-2 takes positions, BioGPT counts them in the mask.
    [
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32), GPT2LMHeadModel),
        (
            BioGptConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=32,
            ),
            BioGptForCausalLM,
        ),
    ],
    ids=["gpt2", "biogpt"],
)  # fmt: skip
def test_a_row_that_is_full_waits_for_the_others(open_backend, tmp_path, config, model) -> None:
    """31 tokens follow a prompt of 1 where 8 follow one of 24; there are 32 positions."""
    torch.manual_seed(0)
    config.vocab_size, config.initializer_range = VOCAB_SIZE, 0.3
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, EOS, 0
    model(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    session = open_backend(model=str(tmp_path / "model")).open_session(
        "a", make_lora(), directory=tmp_path
    )
    prompts = [[50], list(range(95, 119))]
    together = sample(session, prompts=prompts, temperature=0.0, max_tokens=64)
    assert [len(completions[0].tokens) for completions in together] == [31, 8]
    for prompt, completions in zip(prompts, together, strict=True):
        alone = sample(session, prompts=[prompt], temperature=0.0, max_tokens=64)[0][0]
        assert completions[0].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(completions[0].logprobs, alone.logprobs, atol=1e-4)


def test_a_prompt_without_numbers_is_named_and_the_others_go_on(
    open_backend, tiny, tmp_path
) -> None:
    """A token whose embedding is NaN, beside a prompt that is sampled to its end."""
    model = AutoModelForCausalLM.from_pretrained(tiny.untied)
    model.get_input_embeddings().weight.data[100] = torch.nan
    model.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    for fast in (False, True):
        session = open_backend(model=str(tmp_path / "model"), fast=fast).open_session(
            "a", make_lora(), directory=tmp_path
        )
        with pytest.raises(NonFiniteError, match="after 0 tokens of a completion the logits"):
            sample(session, prompts=[[50], [100]])
        assert len(sample(session, prompts=[[50]], max_tokens=3)[0][0].tokens) == 3


def test_greedy_ends_at_any_end_token(open_backend, tiny, tmp_path) -> None:
    """Case 70: an end token that only the generation config knows ends the answer, inclusive."""
    import json
    import shutil
    from pathlib import Path

    free = sample(
        open_backend().open_session("a", make_lora(), directory=tmp_path),
        temperature=0.0,
    )[0][0].tokens.tolist()
    end = free[3]
    copy = tmp_path / "model"
    shutil.copytree(Path(tiny.untied), copy)
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [EOS, end]}))
    session = open_backend(model=str(copy)).open_session("a", make_lora(), directory=tmp_path)
    completion = sample(session, temperature=0.0)[0][0]
    assert completion.tokens.tolist() == free[: free.index(end) + 1]
    assert completion.stop_reason is StopReason.STOP
    assert len(completion.logprobs) == len(completion.tokens)


def test_logprobs_are_those_of_forward(session) -> None:
    """At temperature 1 without cuts, and greedy: what `forward` gives to 1e-4."""
    for temperature in (1.0, 0.0):
        samples = sample(session, num_samples=2, temperature=temperature)
        for prompt, completions in zip(PROMPTS, samples, strict=True):
            for completion in completions:
                tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
                scored = session.forward([Datum(tokens)]).result()[0].numpy()
                np.testing.assert_allclose(
                    completion.logprobs, scored[len(prompt) - 1 :], atol=1e-4
                )


def test_a_seed_gives_the_same_whatever_else_is_in_the_batch(session) -> None:
    """The random numbers belong to (seed, prompt, sample), not to the batch or its size."""
    together = sample(session, num_samples=3, seed=7)
    fewer = sample(session, prompts=PROMPTS[:2], num_samples=2, seed=7)
    for ours, theirs in zip(together[:2], fewer, strict=True):
        for one, other in zip(ours[:2], theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    other_seed = sample(session, num_samples=3, seed=8)
    assert [c.tokens.tolist() for c in other_seed[0]] != [c.tokens.tolist() for c in together[0]]


def test_samples_of_a_prompt_differ(session) -> None:
    """Case 72: a fixed seed does not make the samples of a prompt equal, and repeats as a whole."""
    once = [c.tokens.tolist() for c in sample(session, num_samples=4, seed=42)[0]]
    again = [c.tokens.tolist() for c in sample(session, num_samples=4, seed=42)[0]]
    assert once == again and len({tuple(tokens) for tokens in once}) >= 2
    unseeded = [sample(session, num_samples=4, seed=None)[0][0].tokens.tolist() for _ in range(3)]
    assert unseeded[0] != unseeded[1] or unseeded[1] != unseeded[2]


def test_the_batch_size_does_not_matter(open_backend, tmp_path) -> None:
    results = []
    for budget in (1, 100_000):
        session = open_backend(micro_batch_tokens=budget).open_session(
            "a", make_lora(), directory=tmp_path
        )
        results.append([[c.tokens.tolist() for c in row] for row in sample(session, num_samples=2)])
    assert results[0] == results[1]


def test_frequencies_follow_the_probabilities() -> None:
    """Probabilities 0.5, 0.3, 0.2, 0 by inverse transform of evenly spaced numbers: exact shares."""
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log().expand(1000, 4)
    draws = (torch.arange(1000) + 0.5) / 1000
    tokens, logprobs = draw(logits, draws, temperature=1.0, top_k=0, top_p=1.0)
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 300, 200, 0]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3, 0.2, 0.0])[tokens])


def test_the_largest_draw_never_takes_an_excluded_token() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    largest = torch.tensor([LARGEST_DRAW])
    token, logprob = draw(logits, largest, temperature=1.0, top_k=3, top_p=1.0)
    assert token.item() in logits.topk(3).indices and torch.isfinite(logprob).all()


def test_the_smallest_draw_never_takes_an_excluded_token() -> None:
    """A draw of exactly 0 with the first token excluded gives the second."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0]])
    token, logprob = draw(logits, torch.tensor([0.0]), temperature=1.0, top_k=0, top_p=1.0)
    assert token.item() == 1 and logprob.item() == pytest.approx(np.log(0.5))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Temperature 2 takes square roots: 0.64, 0.16, 0.16, 0.04 -> 0.8, 0.4, 0.4, 0.2 of 1.8.
        (
            {"temperature": 2.0, "top_k": 0, "top_p": 1.0},
            [0.8 / 1.8, 0.4 / 1.8, 0.4 / 1.8, 0.2 / 1.8],
        ),
        # Top-k 1 leaves the first; top-k 4 leaves all.
        ({"temperature": 1.0, "top_k": 1, "top_p": 1.0}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 4, "top_p": 1.0}, [0.64, 0.16, 0.16, 0.04]),
        # Top-p 0.64 is reached by the first token; 0.65 needs the second as well: 0.64 / 0.8.
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.65}, [0.8, 0.2, 0, 0]),
    ],
)
def test_sampling_distribution(settings, expected) -> None:
    logits = torch.tensor([[0.64, 0.16, 0.1599, 0.0401]]).log()
    probs = sampling_logprobs(logits, **settings).exp()
    assert torch.allclose(probs, torch.tensor([expected], dtype=torch.float32), atol=1e-3)


def test_reported_logprobs_are_of_the_cut_distribution(session) -> None:
    """With top-k 1 every draw is certain: log-prob 0."""
    completion = sample(session, top_k=1)[0][0]
    np.testing.assert_allclose(completion.logprobs, 0, atol=1e-6)
    assert completion.tokens.tolist() == sample(session, temperature=0.0)[0][0].tokens.tolist()


def test_stop_ids_and_stop_strings(session) -> None:
    """Case 80: the token in which a stop string ends is kept, with its log-prob."""
    free = sample(session, temperature=0.0, max_tokens=12)[0][0].tokens.tolist()
    by_id = sample(session, temperature=0.0, max_tokens=12, stop=(free[4],))[0][0]
    assert by_id.tokens.tolist() == free[: free.index(free[4]) + 1]
    assert by_id.stop_reason is StopReason.STOP
    # Every token is one character here, so two of them make a stop string across a boundary.
    string = chr(free[2]) + chr(free[3])
    by_string = sample(session, temperature=0.0, max_tokens=12, stop=(string,))[0][0]
    assert by_string.tokens.tolist() == free[:4] and by_string.stop_reason is StopReason.STOP
    assert len(by_string.logprobs) == 4
    cut = sample(session, temperature=0.0, max_tokens=2)[0][0]
    assert cut.tokens.tolist() == free[:2] and cut.stop_reason is StopReason.LENGTH


def test_a_stop_string_inside_a_token_keeps_the_token() -> None:
    """Case 80: stop '..' with the token '...'."""

    class Words:
        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens is False
            return "".join(["Hi", "...", "x"][token] for token in ids)

    assert not ends([0], set(), ("..",), Words())
    assert ends([0, 1], set(), ("..",), Words())
    assert ends([2], {2}, (), Words())


def test_published_weights_are_the_ones_sampled(open_backend, tmp_path) -> None:
    """Case 73: training on does not change what a generator samples; publishing again does."""
    for lora in (make_lora(), None):
        session = open_backend().open_session("a", lora, directory=tmp_path)
        generator = session.publish_weights().result()
        before = generator.sample(PROMPTS, make_sampling(), 1).result()
        for _ in range(3):
            session.forward_backward(make_data(), cross_entropy)
            session.optim_step(make_adam(learning_rate=0.05)).result()
        trained = parameters_of(session)
        still = generator.sample(PROMPTS, make_sampling(), 1).result()
        assert [c[0].tokens.tolist() for c in still] == [c[0].tokens.tolist() for c in before]
        for name, value in parameters_of(session).items():
            assert torch.equal(value, trained[name])
        newer = session.publish_weights().result()
        assert (generator.version, newer.version) == (1, 2)
        after = newer.sample(PROMPTS, make_sampling(), 1).result()
        assert [c[0].tokens.tolist() for c in after] != [c[0].tokens.tolist() for c in before]
        assert after[0][0].version == 2
        with pytest.raises(StaleGenerator, match=r"holds version 1 .* published version 2"):
            generator.sample(PROMPTS, make_sampling(), 1).result()


def test_sampling_leaves_training_alone(session) -> None:
    """A stale or wrong request included: the session trains on."""
    data = make_data()
    session.forward_backward(data, cross_entropy).result()
    gradients, parameters = gradients_of(session), parameters_of(session)
    sample(session)
    with pytest.raises(ConfigError, match="temperature=-1"):
        sample(session, temperature=-1.0)
    for name, value in parameters_of(session).items():
        assert torch.equal(value, parameters[name])
        assert torch.equal(session._weights.parameters[name].grad, gradients[name])
    session.optim_step(make_adam()).result()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop": ("",)}, "stop="),
        ({"num_samples": 0}, "num_samples=0"),
    ],
)
def test_bad_settings_name_the_key(session, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(session, **changes)


def test_prompts_must_fit(session) -> None:
    with pytest.raises(BackendError, match="prompt 1 is empty"):
        sample(session, prompts=[[5], []])
    with pytest.raises(BackendError, match="prompt 0 has 256 tokens, which leaves no room"):
        sample(session, prompts=[[5] * 256])
    with pytest.raises(BackendError, match=r"outside 0\.\.127"):
        sample(session, prompts=[[500]])
    assert len(sample(session, prompts=[[5] * 253], stop=())[0][0].tokens) <= 3
