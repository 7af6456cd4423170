"""`python -m benchmarks sft dpo`: runs cases, prints a table, writes `benchmarks/results/`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import cases, gemm, memory, served, startup
from benchmarks.cases import CONTESTANTS, Options
from benchmarks.machine import circumstances
from benchmarks.report import table

RESULTS = Path(__file__).parent / "results"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CASES = {
    "sft": cases.sft,
    "dpo": cases.dpo,
    "grpo": cases.grpo,
    "adapters": cases.adapters,
    "memory": memory.memory,
    "startup": startup.startup,
    "rendering": startup.rendering,
    "served": served.served,
    "gemm": gemm.gemm,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares the local backend with TRL and PEFT, step by step in turn.",
    )
    parser.add_argument(
        "cases", nargs="+", choices=[*CASES, "all"], metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--model", default=MODEL, help="hub id, folder, or pkg://package/folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--data", type=Path, help="JSONL of `messages` rows (default: generated)")
    parser.add_argument("--preferences", type=Path, help="JSONL of prompt, chosen, rejected")
    parser.add_argument("--prompts", type=Path, help="JSONL of `prompt` rows")
    parser.add_argument(
        "--contestants", default=",".join(CONTESTANTS), help="of " + ",".join(CONTESTANTS)
    )
    parser.add_argument("--steps", type=int, help="timed steps (default: by case)")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 = its own choice")
    parser.add_argument(
        "--checkpointing",
        default="off",
        choices=["off", "on"],
        help="TRL's gradient checkpointing; it is on where TRL is not told otherwise",
    )
    parser.add_argument(
        "--trl-bf16",
        default="autocast",
        choices=["autocast", "weights"],
        help="autocast over float32 weights, as TRL comes, or bfloat16 weights",
    )
    parser.add_argument("--micro-batch", type=int, help="rows (pairs) of trl_tuned's micro-batches")
    parser.add_argument(
        "--length-scale", type=float, default=1.0, help="factor on generated lengths"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the cases of a command line; returns the exit code, 1 if something was not the same."""
    arguments = parser().parse_args(argv)
    contestants = tuple(arguments.contestants.split(","))
    unknown = set(contestants) - set(CONTESTANTS)
    if unknown:
        parser().error(f"--contestants: {', '.join(unknown)}: not of {', '.join(CONTESTANTS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names = list(CASES) if "all" in arguments.cases else list(dict.fromkeys(arguments.cases))
    refused = False
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tunebook-bench-") as work:
            options = Options(
                model=arguments.model,
                device=arguments.device,
                dtype=arguments.dtype,
                data=arguments.data,
                preferences=arguments.preferences,
                prompts=arguments.prompts,
                contestants=contestants,
                steps=arguments.steps,
                threads=arguments.threads,
                checkpointing=arguments.checkpointing,
                trl_bf16=arguments.trl_bf16,
                micro_batch=arguments.micro_batch,
                length_scale=arguments.length_scale,
                seed=arguments.seed,
                work=Path(work),
                tell=lambda text, name=name: print(f"[{name}] {text}", flush=True),
            )
            before = circumstances()
            result = {**CASES[name](options), "circumstances": before}
        arguments.out.mkdir(parents=True, exist_ok=True)
        file = arguments.out / f"{name}_{arguments.device}_{arguments.dtype}.json"
        file.write_text(json.dumps(result, indent=1), encoding="utf-8")
        print(table(result), flush=True)
        refused = refused or is_refused(result)
    return 1 if refused else 0


def is_refused(result: dict[str, object]) -> bool:
    """Whether a ratio is missing because contestants did not compute the same."""
    return '": null' in json.dumps(result.get("ratios", {}))


if __name__ == "__main__":
    sys.exit(main())
