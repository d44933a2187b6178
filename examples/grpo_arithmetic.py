"""GRPO with LoRA on arithmetic tasks under DeepSpeed, and what exact per-rank recovery saves of its update.

    deepspeed --num_gpus 2 examples/grpo_arithmetic.py --deepspeed_config configs/zero2_exact.json

Each training step samples responses, scores them, and makes one update from them. At the end recorded rollouts are
replayed under HiLoRe, under torch's activation checkpointing and without checkpointing, and a table says what each
took. Rows per rank and step = micro batch size x gradient accumulation steps of the JSON, a multiple of --group_size.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
from arithmetic.compare import Comparison, RankFigures, gather
from arithmetic.model import Actor, convert_packaged_model, default_cache_dir, load_actor, packaged_model
from arithmetic.rollout import Microbatch, Rollout, Sampling, sample, to_microbatches
from arithmetic.table import comparison_tables
from arithmetic.task import ArithmeticTasks, TaskConfig
from arithmetic.update import StepSeconds, Stopwatch, run_update, sum_over_ranks
from deepspeed import comm as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ds_hilore
from ds_hilore.core.errors import UsageError
from ds_hilore.objective.grpo import GRPOLossConfig

#: Characters per line where the output is no terminal.
PIPED_WIDTH = 120

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, type=Path, help="DeepSpeed JSON with a hilore block")
    parser.add_argument("--model", type=Path, help="folder of a transformers model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model's weights")
    parser.add_argument("--cache_dir", type=Path, default=default_cache_dir(), help="for the converted default model")
    parser.add_argument("--updates", type=int, default=6, help="training steps")
    parser.add_argument("--turns", type=int, default=4, help="timed updates per method; 0 leaves the comparison out")
    parser.add_argument("--group_size", type=int, default=Sampling.group_size, help="responses per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=Sampling.max_new_tokens, help="per response")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; above 0 needs reference passes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="where the run is logged, for `hilore report`")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    parser.add_argument("--local_rank", type=int, default=local_rank, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def settings(args: argparse.Namespace) -> str | dict[str, Any]:
    """The JSON; with `--report`, its block names that folder."""
    if args.report is None:
        return str(args.deepspeed_config)
    found: dict[str, Any] = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    found["hilore"] = found.get("hilore", {}) | {"report": {"path": str(args.report)}}
    return found


class Demo:
    """One rank of the demo: an engine, a tokenizer, tasks, and what it prints on rank 0."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args = args
        self._console = console
        self._sampling = Sampling(args.group_size, args.max_new_tokens)
        self._loss = GRPOLossConfig(beta=args.beta)
        self._tasks = ArithmeticTasks(TaskConfig(seed=args.seed))
        torch.manual_seed(args.seed)
        actor, self._tokenizer = load_actor(self._model_folder(), DTYPES[args.dtype])
        trainable = [parameter for parameter in actor.parameters() if parameter.requires_grad]
        self._engine, *_ = ds_hilore.initialize(model=actor, model_parameters=trainable, config=settings(args))
        self._prompts = self._prompts_per_rank()
        torch.manual_seed(args.seed + 1 + dist.get_rank())  # ranks sample different responses
        self._replayed: list[Microbatch] = []

    @property
    def has_plan(self) -> bool:
        """False where the JSON has no hilore block, or one that is switched off."""
        return getattr(self._engine, "hilore", None) is not None

    @property
    def _actor(self) -> Actor:
        return self._engine.module

    def train(self) -> list[StepSeconds]:
        """Samples, scores and updates, `--updates` times. Keeps microbatches for `compare`."""
        steps = []
        with self._progress() as progress:
            for step in progress.track(range(self._args.updates), description="GRPO updates"):
                rollout, seconds, loss = self._step(step)
                steps.append(seconds)
                progress.console.print(self._describe(step, rollout, seconds, loss))
        return steps

    def compare(self, steps: Sequence[StepSeconds]) -> list[RankFigures]:
        """Replays the microbatches of the last update with something to learn on every rank, under each method."""
        update = partial(run_update, self._engine, self._replayed, self._loss)
        with self._progress() as progress:
            bar = progress.add_task("Comparison", total=Comparison.updates(self._args.turns))
            comparison = Comparison(self._engine, update, partial(progress.advance, bar))
            share = median(seconds.update / seconds.total for seconds in steps)
            return gather(comparison.run(self._args.turns, share))

    def _step(self, step: int) -> tuple[Rollout, StepSeconds, float]:
        watch = Stopwatch()
        first = (step * dist.get_world_size() + dist.get_rank()) * self._prompts
        drawn = self._tasks.draw(first, self._prompts)
        rollout = sample(self._actor, self._tokenizer, self._tasks, drawn, self._sampling)
        sampled = watch.lap()
        rows = self._engine.train_micro_batch_size_per_gpu()
        microbatches = to_microbatches(self._actor, rollout, rows, with_reference=self._loss.beta > 0)
        # Waits for the slowest sampler, too: that wait is no part of the update.
        teaching_ranks = sum_over_ranks(torch.tensor(int(rollout.teaches), device=rollout.rewards.device))
        if teaching_ranks == dist.get_world_size() or not self._replayed:
            self._replayed = microbatches
        scored = watch.lap()
        loss = run_update(self._engine, microbatches, self._loss)
        return rollout, StepSeconds(sampled, scored, watch.lap()), loss

    def _describe(self, step: int, rollout: Rollout, seconds: StepSeconds, loss: float) -> str:
        groups = rollout.rewards.view(-1, self._sampling.group_size)
        own = [groups.mean(), groups.std(1).mean(), rollout.lengths.float().mean(), torch.tensor(loss)]
        means = sum_over_ranks(torch.stack([value.cpu().float() for value in own]).to(rollout.rewards.device))
        reward, spread, length, loss_sum = means.tolist()
        ranks = dist.get_world_size()
        return (
            f"{step + 1}: reward {reward / ranks:.2f} (group std {spread / ranks:.2f}), "
            f"{rollout.prompt_width} + {length / ranks:.0f} tokens, loss {loss_sum:+.3f}; "
            f"sampling {seconds.sample:.1f} s, old log-probs {seconds.score:.1f} s, update {seconds.update:.1f} s"
        )

    def _model_folder(self) -> Path:
        if self._args.model is not None:
            return self._args.model
        folder = packaged_model(self._args.cache_dir)
        if self._args.local_rank == 0:
            if not folder.exists():
                self._console.print(f"converting SmolLM2-135M-Instruct to {folder}, once (about 30 s)")
            convert_packaged_model(folder)
        dist.barrier()
        return folder

    def _prompts_per_rank(self) -> int:
        rows = self._engine.train_micro_batch_size_per_gpu() * self._engine.gradient_accumulation_steps()
        if rows % self._sampling.group_size:
            raise UsageError(
                f"micro batch x accumulation = {rows} rows per rank do not split into groups of "
                f"{self._sampling.group_size}; change the JSON or --group_size"
            )
        return rows // self._sampling.group_size

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, disable=self._console.quiet)


def quieten_libraries() -> None:
    """Leaves the terminal to the progress bars; warnings and errors still come through."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    deepspeed.utils.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the libraries about each other


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    quieten_libraries()
    deepspeed.init_distributed()
    console = Console(quiet=dist.get_rank() != 0, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    started = time.monotonic()
    demo = Demo(args, console)
    console.print(f"ready after {time.monotonic() - started:.0f} s: {_ranks_text()}, {args.deepspeed_config.name}")
    steps = demo.train()
    if args.turns and demo.has_plan:
        console.print(*comparison_tables(demo.compare(steps)), sep="\n")
    console.print(f"done after {time.monotonic() - started:.0f} s")
    if args.report is not None:
        console.print(f"pictures of it: hilore report {args.report}", soft_wrap=True)
    dist.destroy_process_group()


def _ranks_text() -> str:
    return f"{dist.get_world_size()} rank(s) on {deepspeed.accelerator.get_accelerator().device_name()}"


if __name__ == "__main__":
    main()
