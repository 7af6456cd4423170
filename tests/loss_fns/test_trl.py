"""The same numbers as TRL's own loss code, value and gradient to 1e-5, where TRL has the loss.

Its trainers compute a loss in a method that reads log-probs and settings; it is called here with
just those. What it reads is internal to TRL, hence the version.
"""

import os
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loss_fns import dpo, policy
from loss_fns.kl import with_kl
from tests.loss_fns.batches import columns_of, value_and_gradient
from tunebook import token_weights

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16", reason="its loss code of 1.16 is called")
LENGTHS = (3, 5, 4, 2, 1, 5)
EQUAL = (3, 3, 3, 2, 3, 5)
"""Chosen completions of equal length: TRL's `sft` averages over tokens, ours over completions."""
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class OneProcess:
    """What TRL asks of its accelerator where there is one process."""

    device = torch.device("cpu")
    num_processes = 1

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor


def completions(lengths):
    """Rows of one prompt token and completions; every log-prob column, and the mask `[B, T]`."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), 1 + max(lengths))
    mask = torch.zeros(shape)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = 1
    logprobs = -3 * torch.rand(shape, generator=generator) * mask
    drift = [(torch.rand(shape, generator=generator) - 0.5) * mask for _ in range(2)]
    return logprobs, logprobs + drift[0], logprobs + 2 * drift[1], mask


def chosen_first(rows):
    """Our order, chosen and rejected alternating, to TRL's: all chosen, then all rejected."""
    return torch.cat([rows[0::2], rows[1::2]])


def trl_preference(loss_type, logprobs, reference, mask, *, beta, label_smoothing=0.0, tau=0.05):
    """Value and gradient by TRL; `loss_type` may be several with weights, as `a:1+b:0.5`."""
    from trl.trainer.dpo_trainer import DPOTrainer

    kinds = [kind.partition(":") for kind in loss_type.split("+")]
    leaf = logprobs.clone().requires_grad_()
    ordered = chosen_first(leaf * mask)  # its head gives 0 where a label is ignored
    zeros = torch.zeros_like(ordered)
    model = SimpleNamespace(training=False)
    outputs = SimpleNamespace(
        log_probs=ordered, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    sums = chosen_first((reference * mask).sum(dim=1))
    # Its masks are of tokens, ours of the tokens that are scored: one fewer, the first.
    completion_mask = torch.nn.functional.pad(chosen_first(mask), (1, 0)).long()
    trainer = SimpleNamespace(
        accelerator=OneProcess(),
        model=model,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind for kind, _, _ in kinds],
        loss_weights=[float(weight or 1) for _, _, weight in kinds],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=tau),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": sums[: len(sums) // 2],
        "ref_rejected_logps": sums[len(sums) // 2 :],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, trainer._metrics["eval"]


def ours_preference(loss, logprobs, reference, mask):
    pairs = len(logprobs) // 2
    columns = {
        "token_weights": mask,
        "pair_weights": torch.full((2 * pairs,), 1 / pairs),
        "reference_logprobs": reference,
    }
    return value_and_gradient(loss, logprobs, columns)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize(
    ("loss", "loss_type", "settings"),
    [
        (dpo.dpo_sigmoid, "sigmoid", {}),
        (partial(dpo.dpo_robust, label_smoothing=0.1), "robust", {"label_smoothing": 0.1}),
        (dpo.dpo_hinge, "hinge", {}),
        (dpo.ipo, "ipo", {}),
        (dpo.dpo_sigmoid_norm, "sigmoid_norm", {}),
        (dpo.apo_zero, "apo_zero", {}),
        (dpo.apo_down, "apo_down", {}),
        (partial(dpo.exo_pair, label_smoothing=0.01), "exo_pair", {"label_smoothing": 0.01}),
        (dpo.nca_pair, "nca_pair", {}),
        (dpo.sppo_hard, "sppo_hard", {}),
        (partial(dpo.discopop, tau=0.05), "discopop", {"tau": 0.05}),
        (partial(dpo.dpo_sft, sft_weight=0.5), "sigmoid:1+sft:0.5", {}),
    ],
)
def test_preference_losses(loss, loss_type, settings, beta):
    logprobs, reference, _, mask = completions(EQUAL if "sft" in loss_type else LENGTHS)
    value, gradient, _ = ours_preference(partial(loss, beta=beta), logprobs, reference, mask)
    theirs = trl_preference(loss_type, logprobs, reference, mask, beta=beta, **settings)
    assert torch.allclose(value, theirs[0], **TOLERANCE)
    assert torch.allclose(gradient, theirs[1], **TOLERANCE)
    assert gradient.any()


def test_preference_metrics():
    """For losses on sums; TRL reports sums for losses on averages too."""
    logprobs, reference, _, mask = completions(LENGTHS)
    _, _, ours = ours_preference(partial(dpo.dpo_sigmoid, beta=0.1), logprobs, reference, mask)
    _, _, theirs = trl_preference("sigmoid", logprobs, reference, mask, beta=0.1)
    for name, key in {
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "chosen_logprob": "logps/chosen",
        "rejected_logprob": "logps/rejected",
    }.items():
        assert ours[name].item() == pytest.approx(theirs[key][0], rel=1e-5, abs=1e-6), name


def row_averages(logprobs, mask):
    averages = (logprobs * mask).sum(dim=1) / mask.sum(dim=1)
    return averages[0::2], averages[1::2]


def test_simpo():
    from trl.experimental.cpo import CPOTrainer

    logprobs, reference, _, mask = completions(LENGTHS)
    value, gradient, _ = ours_preference(
        partial(dpo.simpo, beta=2.0, gamma=1.0), logprobs, reference, mask
    )
    trainer = SimpleNamespace(
        accelerator=OneProcess(),
        alpha=0.0,
        beta=2.0,
        loss_type="simpo",
        simpo_gamma=1.0,
        label_smoothing=0.0,
    )
    leaf = logprobs.clone().requires_grad_()
    theirs = CPOTrainer.cpo_loss(trainer, *row_averages(leaf, mask))[0].mean()
    assert torch.allclose(value, theirs, **TOLERANCE)
    assert torch.allclose(gradient, torch.autograd.grad(theirs, leaf)[0], **TOLERANCE)


def test_orpo():
    """TRL's odds ratio beside the negative log-likelihood of the chosen completion."""
    from trl.experimental.orpo import ORPOTrainer

    logprobs, reference, _, mask = completions(LENGTHS)
    value, gradient, _ = ours_preference(partial(dpo.orpo, beta=0.7), logprobs, reference, mask)
    leaf = logprobs.clone().requires_grad_()
    chosen, rejected = row_averages(leaf, mask)
    trainer = SimpleNamespace(accelerator=OneProcess(), beta=0.7)
    odds = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    theirs = (-chosen - odds).mean()
    assert torch.allclose(value, theirs, **TOLERANCE)
    assert torch.allclose(gradient, torch.autograd.grad(theirs, leaf)[0], **TOLERANCE)


ADVANTAGES = (1.5, -0.5, -1.0, 0.25, 0.0, -2.0)


def trl_policy(loss_type, batch, *, low, high, beta=0.0, level="token", horizon=8, bias=False):
    """Value, gradient and metrics by TRL; its columns hold completions only."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs, sampling, reference, mask = (each[:, 1:] for each in batch)
    leaf = logprobs.clone().requires_grad_()
    trainer = SimpleNamespace(
        accelerator=OneProcess(),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(use_bias_correction_kl=bias, delta=None, steps_per_generation=1),
        use_vllm=False,
        max_completion_length=horizon,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(leaf), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(leaf), 1, dtype=torch.long),
        "completion_ids": torch.zeros(leaf.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": sampling,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, trainer._metrics["eval"]


def ours_policy(loss, batch, normalize):
    logprobs, sampling, reference, mask = batch
    weights = normalize([row.numpy() for row in mask])
    columns = {
        "token_weights": torch.from_numpy(np.stack(weights)),
        "sampling_logprobs": sampling,
        "reference_logprobs": reference,
        "advantages": torch.tensor(ADVANTAGES)[:, None].expand_as(mask),
    }
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns_of(loss, columns))
    assert not gradient[:, 0].any()
    return value, gradient[:, 1:], metrics


@pytest.mark.parametrize(
    ("loss_type", "normalize"),
    [
        ("grpo", token_weights.sequence_mean),
        ("dapo", token_weights.token_mean),
        ("bnpo", token_weights.token_mean),
        ("dr_grpo", partial(token_weights.fixed_horizon, horizon=8)),
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_grpo_with_every_divisor(loss_type, normalize, beta):
    batch = completions(LENGTHS)
    loss = partial(policy.grpo, clip_low=0.8, clip_high=1.1)
    value, gradient, metrics = ours_policy(
        with_kl(loss, beta=beta, estimator="k3") if beta else loss, batch, normalize
    )
    theirs = trl_policy(loss_type, batch, low=0.2, high=0.1, beta=beta)
    assert torch.allclose(value, theirs[0], **TOLERANCE)
    assert torch.allclose(gradient, theirs[1], **TOLERANCE)
    for name, key in (
        ("clipped_low_sum", "clip_ratio/low_mean"),
        ("clipped_high_sum", "clip_ratio/high_mean"),
        *([("kl_sum", "kl")] if beta else []),
    ):
        share = metrics[name].item() / metrics["num_tokens"].item()
        assert share == pytest.approx(theirs[2][key][0], rel=1e-5)
        assert share > 0


def test_ppo_is_the_same_surrogate():
    batch = completions(LENGTHS)
    loss = partial(policy.ppo, clip_low=0.8, clip_high=1.1)
    value, gradient, _ = ours_policy(loss, batch, token_weights.token_mean)
    theirs = trl_policy("dapo", batch, low=0.2, high=0.1)
    assert torch.allclose(value, theirs[0], **TOLERANCE)
    assert torch.allclose(gradient, theirs[1], **TOLERANCE)


@pytest.mark.parametrize(("low", "high"), [(0.02, 0.03), (0.5, 0.5)])
def test_gspo(low, high):
    """TRL's sequence level with its `grpo` divisor, where advantages are equal within a row."""
    batch = completions(LENGTHS)
    loss = partial(policy.gspo, clip_low=1 - low, clip_high=1 + high)
    value, gradient, _ = ours_policy(loss, batch, token_weights.sequence_mean)
    theirs = trl_policy("grpo", batch, low=low, high=high, level="sequence")
    assert torch.allclose(value, theirs[0], **TOLERANCE)
    assert torch.allclose(gradient, theirs[1], **TOLERANCE)
    assert gradient.any()


def test_cispo():
    """TRL clamps from above only, and calls the absolute bound epsilon_high."""
    batch = completions(LENGTHS)
    loss = partial(policy.cispo, clip_low=0.0, clip_high=1.1)
    value, gradient, metrics = ours_policy(loss, batch, token_weights.token_mean)
    theirs = trl_policy("cispo", batch, low=0.2, high=1.1)
    assert torch.allclose(value, theirs[0], **TOLERANCE)
    assert torch.allclose(gradient, theirs[1], **TOLERANCE)
    assert metrics["clipped_high_sum"] > 0


def test_the_kl_term_differs_where_trl_weights_it_by_the_ratio():
    """`use_bias_correction_kl`, on by default there: said in the docstring, so shown here."""
    batch = completions(LENGTHS)
    loss = with_kl(partial(policy.grpo, clip_low=0.8, clip_high=1.1), beta=0.2, estimator="k3")
    value, _, _ = ours_policy(loss, batch, token_weights.token_mean)
    theirs = trl_policy("dapo", batch, low=0.2, high=0.1, beta=0.2, bias=True)
    assert abs(value - theirs[0]) > 1e-4
