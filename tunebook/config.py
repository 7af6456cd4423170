"""Config schemas, and the three ways in: `compose`, `parse`, `build`.

Values live in the YAML files of `configs/`, types, units and documentation here. The schema comes
first in every defaults list, so a key nobody reads fails while composing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from tunebook import types


class RowFormat(StrEnum):
    """Shape of the rows of a source."""

    auto = "auto"
    messages = "messages"
    prompt_completion = "prompt_completion"
    preference = "preference"
    prompt = "prompt"


class Mask(StrEnum):
    """Which tokens carry loss."""

    all_assistant = "all_assistant"
    last_assistant = "last_assistant"
    all = "all"


class OnBadRow(StrEnum):
    """What happens to a row that cannot be used."""

    fail = "fail"
    skip = "skip"


class OnLongRow(StrEnum):
    """What happens to a row longer than `max_seq_len`."""

    truncate = "truncate"
    truncate_prompt = "truncate_prompt"
    skip = "skip"
    error = "error"


class OnBlankAnswer(StrEnum):
    """What happens to a row whose trained answer is empty or white space."""

    error = "error"
    end_token = "end_token"


class Normalization(StrEnum):
    """The divisor of the loss over one optimizer step; see `tunebook.token_weights`."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    prompt_mean = "prompt_mean"
    fixed_horizon = "fixed_horizon"
    token_sum = "token_sum"


class OptimizerKind(StrEnum):
    """The update rule."""

    adamw = "adamw"
    muon = "muon"


class ScheduleKind(StrEnum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class OnRewardError(StrEnum):
    """What happens when a reward function raises or takes too long."""

    fail = "fail"
    skip = "skip"


class OnTruncated(StrEnum):
    """What happens to a completion that ran into `rollout.max_new_tokens`."""

    keep = "keep"
    mask = "mask"
    penalise = "penalise"


class AdvantageEstimator(StrEnum):
    """How rewards become advantages; see `tunebook.advantages`."""

    group_mean = "group_mean"
    group_std = "group_std"
    batch_std = "batch_std"
    rloo = "rloo"
    maxrl = "maxrl"


class KLEstimator(StrEnum):
    """Estimate of the KL divergence to the reference; see `loss_fns.kl`."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLPlacement(StrEnum):
    """Where the KL term goes."""

    loss = "loss"
    reward = "reward"


class Direction(StrEnum):
    """Which way a metric improves."""

    down = "down"
    up = "up"


@dataclass
class SourceConfig:
    """One source of rows: exactly one of `path`, `hub`, `function`."""

    path: str | None = None
    """JSONL, JSON, CSV or Parquet file, a folder (the files directly in it) or a glob (`**`
    descends); `pkg://package/file` for a packaged one."""
    hub: str | None = None
    """Hub dataset id, loaded through `datasets`."""
    subset: str | None = None
    """Hub dataset configuration name."""
    split: str | None = None
    """Hub dataset split; null = train."""
    revision: str | None = None
    """Hub dataset revision: branch, tag or commit."""
    function: str | None = None
    """Dotted path of a function that returns rows (dicts)."""
    function_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `function`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames, our name: name in the source, for example {prompt: question, answer: solution}."""
    limit: int | None = None
    """Rows to take from the start of the source; null = all."""
    weight: float = 1.0
    """Appearances of each row per epoch: 2 = twice, 0.5 = every other epoch."""

    @property
    def is_given(self) -> bool:
        """Whether it names anything to read."""
        return (self.path or self.hub or self.function) is not None


@dataclass
class DataConfig(SourceConfig):
    """The rows of a run: one source inline, or several under `sources`."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources mixed by their `weight`; then path, hub and function stay null."""
    eval: SourceConfig = field(default_factory=SourceConfig)
    """A separate source of eval rows; if nothing is named here, a split is held out."""
    format: RowFormat = MISSING
    """Shape of the rows; auto = told from the columns."""
    system_prompt: str | None = None
    """Put first in every row; rows that already have a system message make it refuse."""
    mask: Mask = MISSING
    """Which tokens carry loss. Per-message `weight`/`trainable` fields refine it."""
    on_bad_row: OnBadRow = MISSING
    """fail = refuse with every located problem; skip = leave such rows out, counted and listed."""
    on_long_row: OnLongRow = MISSING
    """truncate = cut on the right (no end token is invented); truncate_prompt = cut both prompts of
    a preference pair on the left; skip; error. A pair that keeps no answer on one side, and a
    prompt to sample from that is too long, are left out rather than cut."""
    on_blank_answer: OnBlankAnswer = MISSING
    """error = a bad row; end_token = supervise only the end of the turn."""
    id_column: str | None = None
    """Column that identifies a row, so that an edited row keeps its side of the split."""
    group_column: str | None = None
    """Column whose equal values stay on one side of the split, for example a document id."""


@dataclass
class ModelConfig:
    """The base model."""

    name: str = MISSING
    """Hub id or folder; `pkg://package/folder` for a packaged model."""
    revision: str | None = None
    """Hub revision: branch, tag or commit."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; null = the model's own."""
    chat_template: str | None = None
    """File with a Jinja template to use instead of the model's; `none` = render as plain text."""
    trust_remote_code: bool = MISSING
    """Allow a model repository to run its own Python code."""
    allow_pickle: bool = MISSING
    """Allow weights that are not safetensors, which can run code when loaded."""


@dataclass
class PlanConfig:
    """How long to train; exactly one of `epochs` and `max_steps`."""

    batch_size: int = MISSING
    """Rows per optimizer step (DPO: pairs, GRPO: prompts)."""
    epochs: float | None = None
    """Passes over the training rows; exactly one of `epochs` and `max_steps`, the other null."""
    max_steps: int | None = None
    """Optimizer steps; exactly one of `max_steps` and `epochs`, the other null."""
    checkpoint_every: int = MISSING
    """Steps between evaluations and checkpoints; 0 = only at the end."""
    drop_last: bool = MISSING
    """Leave out the partial last batch of an epoch; the plan states the unused rows."""
    probe: bool = MISSING
    """Measure one step on the backend for the time and memory estimate of a dry run."""
    hash: str | None = None
    """Refuse to run unless the plan has this hash (as printed by a dry run)."""


@dataclass
class EvalConfig:
    """The held-out split and the metric that picks the best checkpoint."""

    fraction: float = MISSING
    """Share of the rows held out; 0 = none."""
    min_rows: int = MISSING
    """Rows; a smaller share holds out nothing."""
    max_rows: int = MISSING
    """Rows; a larger share is capped."""
    monitor: str | None = None
    """Metric that picks the best checkpoint; null = the recipe's own."""
    direction: Direction | None = None
    """Which way `monitor` improves; null = inferred from its name (loss down, accuracy up)."""


@dataclass
class EarlyStoppingConfig:
    """Stop when the monitor no longer improves."""

    patience: int | None = None
    """Evaluations without an improvement; null = off."""
    min_delta: float = MISSING
    """Change of the monitor that counts as an improvement (strictly more than this)."""


@dataclass
class CheckpointsConfig:
    """Which checkpoints stay on disk."""

    keep: int = MISSING
    """Checkpoints kept; the best and the newest always are."""


@dataclass
class LimitsConfig:
    """What a run may take; one that is projected to take more does not start."""

    max_seconds: float | None = None
    """Seconds of the backend's estimate for the steps to make; null = any."""
    max_cost: float | None = None
    """US dollars of that estimate; null = any."""
    min_free_bytes: int = MISSING
    """Bytes that stay free in `runs_dir` beside the checkpoints and the model."""


@dataclass
class OptimizerConfig:
    """One optimizer step. Every value is sent at every step."""

    kind: OptimizerKind = MISSING
    """Update rule; muon needs full weights."""
    learning_rate: float = MISSING
    """Peak learning rate."""
    beta1: float = MISSING
    """Decay of the first moment."""
    beta2: float = MISSING
    """Decay of the second moment."""
    eps: float = MISSING
    """Added to the root of the second moment."""
    weight_decay: float = MISSING
    """Decoupled weight decay."""
    max_grad_norm: float = MISSING
    """Global gradient norm to clip to; 0 = off."""
    momentum: float = MISSING
    """muon only: decay of the momentum."""
    newton_schulz_steps: int = MISSING
    """muon only: iterations of the orthogonalisation."""


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    kind: ScheduleKind = MISSING
    """Shape after warm-up."""
    warmup: float = MISSING
    """Steps if >= 1, a fraction of the planned steps if below 1; the peak is reached at its end."""
    final_fraction: float = MISSING
    """Floor as a fraction of the peak: the decay would reach it one step after the last."""
    decay: float = MISSING
    """wsd only: fraction of the planned steps spent decaying."""


@dataclass
class LoraSettings:
    """The adapter; `lora=null` trains the full weights."""

    rank: int = MISSING
    """Inner dimension of B A."""
    alpha: float = MISSING
    """Scale numerator: the update is alpha / rank * B A."""
    dropout: float = MISSING
    """Share of adapter inputs zeroed while training."""
    target_modules: Any = MISSING
    """`all-linear`, or a list of suffixes of module names such as [q_proj, v_proj]."""
    seed: int = MISSING
    """Seed of the initial A."""
    rslora: bool = MISSING
    """Scale by alpha / sqrt(rank) instead."""

    def to_lora(self) -> types.LoraConfig:
        """The adapter as backends take it."""
        targets = self.target_modules
        return types.LoraConfig(
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            seed=self.seed,
            rslora=self.rslora,
        )


@dataclass
class SamplesConfig:
    """Answers sampled before and after training, to look at."""

    num_prompts: int = MISSING
    """Prompts of the eval split (else of the training rows) to answer; 0 = none."""
    max_tokens: int = MISSING
    """Tokens of the longest answer."""
    temperature: float = MISSING
    """0 = greedy."""


@dataclass
class HalvingConfig:
    """Which trials of a sweep go on; see `tunebook.sweeps.halving`."""

    rungs: list[int] = field(default_factory=list)
    """Steps after whose evaluation trials are compared; none = all train to their end."""
    keep: float = 0.5
    """Share of the trials that came to a rung that goes on from it."""


@dataclass
class SweepConfig:
    """How the runs of `--multirun` train together; `sweep=<file>` says which runs there are."""

    max_at_once: int | None = None
    """Runs trained at the same time; null = as many as the backend and the memory hold."""
    max_cost: float | None = None
    """US dollars that the runs left to train may be expected to cost together; null = no limit."""
    resume: str | None = None
    """Folder of a sweep to go on with: only what is missing or failed is trained."""
    halving: HalvingConfig = field(default_factory=HalvingConfig)
    """Stop the worst runs early."""


@dataclass
class RecipeConfig:
    """The keys every recipe shares."""

    backend: dict[str, Any] = MISSING
    """`_target_` and its arguments."""
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    """Rows to train on."""
    loss: dict[str, Any] = MISSING
    """`_target_` of the loss function and its hyper-parameters."""
    tracker: dict[str, Any] | None = None
    """`_target_` of an experiment tracker and its arguments; null = none."""
    name: str | None = None
    """Name of the run, part of its folder's name."""
    seed: int = MISSING
    """Seed of the order of the rows, and of what is sampled: rollouts and samples."""
    runs_dir: str = MISSING
    """Folder that run directories are made in."""
    plan: PlanConfig = MISSING
    eval: EvalConfig = MISSING
    early_stopping: EarlyStoppingConfig = MISSING
    checkpoints: CheckpointsConfig = MISSING
    limits: LimitsConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    schedule: ScheduleConfig = MISSING
    lora: LoraSettings | None = MISSING
    """The adapter, described by the keys below; null = full weights."""
    max_seq_len: int = MISSING
    """Tokens of the longest row."""
    start_from: str | None = None
    """A run directory, checkpoint or adapter to begin from (weights only, step 0)."""
    resume: str | None = None
    """A run directory to go on with, exactly."""
    dry_run: bool = MISSING
    """Stop after preparing, having printed and written the plan."""
    strict: bool = MISSING
    """Refuse to run where a setting would have to be downgraded."""
    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass
class NormalizationConfig:
    """The divisor of the loss over one optimizer step."""

    kind: Normalization = MISSING
    """What the loss is a mean over."""
    horizon: int | None = None
    """fixed_horizon only: tokens that stand for a full row."""


@dataclass
class SFTConfig(RecipeConfig):
    """Supervised fine-tuning."""

    normalization: NormalizationConfig = MISSING
    """How the loss is averaged."""
    samples: SamplesConfig = MISSING


@dataclass
class DPOConfig(RecipeConfig):
    """Direct preference optimisation, on pairs of a chosen and a rejected answer."""

    samples: SamplesConfig = MISSING


@dataclass
class RewardConfig:
    """What scores a completion."""

    functions: dict[str, Any] = MISSING
    """Name -> `_target_` of a reward function, its arguments, and `weight` (1 if left out)."""
    timeout_s: float = MISSING
    """Seconds that one call may take; beyond, the completion is unscored by that function."""
    max_concurrency: int = MISSING
    """Calls that run at a time."""
    on_error: OnRewardError = MISSING
    """fail = end the run with the traceback; skip = the completion is unscored, counted, reported.
    A time-out is treated likewise."""


@dataclass
class RolloutConfig:
    """How completions are sampled and trained."""

    group_size: int = MISSING
    """Completions per prompt; at least 2."""
    max_new_tokens: int = MISSING
    """Tokens of the longest completion, of one turn where there are several."""
    temperature: float = MISSING
    """Of sampling, and of the log-probs that are trained."""
    eval_group_size: int = MISSING
    """Completions of each held-out prompt, over which its reward is averaged."""
    eval_temperature: float | None = None
    """Of sampling for the evaluation; 0 = greedy, null = `temperature`."""
    top_p: float = MISSING
    """Must be 1: the trained ratio would not be that of the sampler."""
    top_k: int = MISSING
    """Must be 0 (off), for the same reason."""
    stop: list[Any] = field(default_factory=list)
    """Strings or token ids that end a completion, besides the model's own end tokens."""
    num_substeps: int = MISSING
    """Optimizer updates per rollout batch, each on its share of the groups."""
    num_iterations: int = MISSING
    """Passes over the completions of one rollout batch."""
    policy_lag: int = MISSING
    """Steps between the weights that sample and those that are trained: 0, or 1 = the next batch is
    sampled while this one is trained. A run that goes on samples its first batch from the weights
    it goes on from, so with 1 it is not bit for bit what it would have been without the stop."""
    truncated: OnTruncated = MISSING
    """Completions without an end: keep them, mask them out of the loss, or penalise them softly."""
    penalty_buffer: int = MISSING
    """truncated=penalise: the last tokens before max_new_tokens, over which a penalty grows
    linearly from 0 to 1."""
    dynamic_sampling: int = MISSING
    """Further prompts that one step may sample to replace groups whose rewards are all equal; 0 =
    off."""


@dataclass
class KeptConfig:
    """Completions that are kept in `samples/`, to look at."""

    num_prompts: int = MISSING
    """Prompts of a step, and of an evaluation, whose completions are kept; 0 = none."""


@dataclass
class AdvantageConfig:
    """How rewards become advantages."""

    estimator: AdvantageEstimator = MISSING
    """What rewards are compared with and scaled by."""


@dataclass
class KLConfig:
    """Distance from the policy at the start of the run."""

    beta: float = MISSING
    """Weight of the KL term; 0 = off, and no reference is kept."""
    estimator: KLEstimator = MISSING
    """How it is estimated from the sampled tokens."""
    placement: KLPlacement = MISSING
    """loss = a term with a gradient of its own; reward = taken off the advantages, centred."""


@dataclass
class HealthConfig:
    """Rules that watch a run and say what looks wrong."""

    window: int = MISSING
    """Steps that a rule looks back on."""
    stop: list[str] = field(default_factory=list)
    """Names of the rules that end the run when they fire; `all` = any of them."""


@dataclass
class GRPOConfig(RecipeConfig):
    """Group-relative policy optimisation: sample, score, and train on what scored better."""

    reward: RewardConfig = MISSING
    rollout: RolloutConfig = MISSING
    advantage: AdvantageConfig = MISSING
    kl: KLConfig = MISSING
    normalization: NormalizationConfig = MISSING
    """How the loss is averaged over one optimizer update."""
    environment: dict[str, Any] | None = None
    """`_target_` of an environment and its arguments; null = one answer per prompt."""
    samples: KeptConfig = MISSING
    health: HealthConfig = MISSING
