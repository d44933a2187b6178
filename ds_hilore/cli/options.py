"""Options that several commands have in common: the JSON, the model, a microbatch of it, and how it is trained."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hilore.core.errors import UsageError

if TYPE_CHECKING:
    from ds_hilore.integration.outlook import Training
    from ds_hilore.integration.rehearsal import Subject


def add_subject(parser: argparse.ArgumentParser) -> None:
    """What is looked at."""
    parser.add_argument("--config", type=Path, required=True, metavar="DS.json", help="the DeepSpeed JSON")
    parser.add_argument("--model", required=True, metavar="PATH", help="folder with a config.json, or that file")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        required=True,
        metavar=("B", "T"),
        help="a microbatch: sequences, and their length",
    )


def add_training(parser: argparse.ArgumentParser) -> Any:
    """How it is trained, as far as neither the JSON nor the model says. Gives the group, for options of one command."""
    training = parser.add_argument_group("training")
    training.add_argument("--lora-rank", type=int, default=16, metavar="R", help="default 16")
    training.add_argument(
        "--lora-targets", nargs="+", default=["all-linear"], metavar="NAME", help="as peft's (default all-linear)"
    )
    training.add_argument("--lora-dropout", type=float, default=0.0, metavar="P")
    training.add_argument("--full-finetuning", action="store_true", help="every parameter is trained, no LoRA")
    training.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help='for "auto" in the JSON')
    training.add_argument("--accumulation", type=int, default=1, metavar="N", help='for "auto" in the JSON')
    training.add_argument(
        "--attention", choices=("eager", "sdpa", "flash_attention_2"), help="default: the model's own"
    )
    training.add_argument("--whole-logits", action="store_true", help="the loss makes the logits of all tokens at once")
    return training


def training_of(arguments: argparse.Namespace, world_size: int) -> Training:
    """What the options say.

    Raises:
        UsageError: a number that makes no sense.
    """
    from ds_hilore.core.types import Shape
    from ds_hilore.integration.outlook import ALL_LINEAR, Lora, Training
    from ds_hilore.profiling.geometry import Attention

    ways = {"eager": Attention.EAGER, "sdpa": Attention.SDPA, "flash_attention_2": Attention.FLASH, None: None}
    for name in ("lora_rank", "accumulation"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    targets = arguments.lora_targets
    lora = Lora(
        arguments.lora_rank,
        ALL_LINEAR if targets == [ALL_LINEAR] else tuple(targets),
        arguments.lora_dropout,
        getattr(arguments, "lora_alpha", Lora.alpha),
    )
    return Training(
        shape=Shape(*tokens_of(arguments)),
        world_size=world_size,
        lora=None if arguments.full_finetuning else lora,
        dtype=arguments.dtype,
        accumulation=arguments.accumulation,
        attention=ways[arguments.attention],
        padded=getattr(arguments, "padded", False),
        whole_logits=arguments.whole_logits,
        foreign_bytes=int(getattr(arguments, "held_by_others", 0.0) * 2**30),
    )


def tokens_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """Sequences and length of --tokens.

    Raises:
        UsageError: one of them is below 1.
    """
    segments, length = arguments.tokens
    if min(segments, length) < 1:
        raise UsageError(f"--tokens {segments} {length}: both must be at least 1")
    return segments, length


def read_json(path: Path) -> dict[str, Any]:
    """The DeepSpeed JSON of --config.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; name the DeepSpeed JSON") from None
    except ValueError as error:
        raise UsageError(f"--config {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path} holds a {type(found).__name__}; a DeepSpeed JSON is an object")
    return found


def add_rehearsal(parser: argparse.ArgumentParser) -> None:
    """Options of commands that run updates here."""
    add_subject(parser)
    parser.add_argument("--random-weights", action="store_true", help="do not read weights, even where they are there")
    parser.add_argument("--json", action="store_true", help="for machines: one object, bytes and seconds")
    training = add_training(parser)
    training.add_argument("--lora-alpha", type=int, default=8, metavar="A", help="as peft's (default 8)")


def subject_of(arguments: argparse.Namespace, ds: Mapping[str, Any]) -> Subject:
    """What the options of `add_rehearsal` say.

    Raises:
        UsageError: a number that makes no sense.
    """
    from ds_hilore.integration.rehearsal import Subject

    training = training_of(arguments, int(os.environ.get("WORLD_SIZE", "1")))
    return Subject(arguments.model, ds, training, arguments.attention, arguments.random_weights)
