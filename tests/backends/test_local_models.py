"""The local backend on models that mean something: the packaged one, and SmolLM2-135M."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_lora, make_sampling
from tunebook.models import load_tokenizer, resolve_model
from tunebook.types import Datum, StopReason

TINY = "pkg://tunebook/assets/tiny_model"
QUESTIONS = ["What is 3 + 4?", "Hello!", "Say it in one word: the colour of the sky on a clear day"]


def chat_ids(tokenizer, *turns: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=len(turns) % 2 == 1
    )


def check_greedy_and_training(open_backend, tmp_path, name: str, *, max_tokens: int) -> None:
    tokenizer = load_tokenizer(name)
    session = open_backend(model=name).open_session(
        "a", make_lora(rank=8, alpha=16.0), directory=tmp_path
    )
    reference = AutoModelForCausalLM.from_pretrained(
        resolve_model(name), dtype=torch.float32
    ).eval()
    prompts = [chat_ids(tokenizer, question) for question in QUESTIONS]
    generator = session.publish_weights().result()
    params = make_sampling(temperature=0.0, max_tokens=max_tokens)
    for prompt, (completion,) in zip(
        prompts, generator.sample(prompts, params, 1).result(), strict=True
    ):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        assert completion.tokens.tolist() == theirs
        stopped = completion.stop_reason is StopReason.STOP
        assert stopped == (theirs[-1] == tokenizer.eos_token_id)

    prompt, whole = prompts[0], chat_ids(tokenizer, QUESTIONS[0], "It is 7.")
    assert whole[: len(prompt)] == prompt
    weights = np.zeros(len(whole) - 1, np.float32)
    weights[len(prompt) - 1 :] = 1 / (len(whole) - len(prompt))
    row = Datum(np.array(whole, np.int32), {"token_weights": weights})
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([whole])).logits[0, :-1]
    labels = torch.tensor(whole[1:])
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses = []
    for _ in range(3):
        losses.append(session.forward_backward([row], cross_entropy).result()["loss"])
        session.optim_step(make_adam(learning_rate=2e-3)).result()
    assert losses[0] == pytest.approx(float(nll[len(prompt) - 1 :].mean()), abs=1e-4)
    assert losses[2] < losses[1] < losses[0]


def test_the_packaged_model(open_backend, tmp_path) -> None:
    check_greedy_and_training(open_backend, tmp_path, TINY, max_tokens=40)


@pytest.mark.real
def test_smollm2(open_backend, tmp_path, smollm2) -> None:
    check_greedy_and_training(open_backend, tmp_path, str(smollm2), max_tokens=8)
