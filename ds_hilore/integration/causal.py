"""A causal language model as GRPO trainers run it: log-probabilities of the tokens that it was shown, not logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hilore.objective.chunked import log_probs
from ds_hilore.objective.head import LogitOptions


class LogProbs:
    """A causal language model's forward that gives log-probabilities in place of logits.

    Copies and pickles with its model. `whole_logits`: [B, T, vocabulary] at once; else in chunks.
    """

    def __init__(self, causal: Any, whole_logits: bool) -> None:
        self._causal = causal
        self._whole_logits = whole_logits

    def __call__(self, input_ids: Tensor, scored: Tensor, **_: Any) -> Tensor:
        """[B, T - 1] log-probabilities of input_ids[:, 1:], 0 where `scored` [B, T - 1] is false."""
        return response_log_probs(self._causal, input_ids, scored, self._whole_logits)


def response_log_probs(causal: Any, input_ids: Tensor, scored: Tensor, whole_logits: bool) -> Tensor:
    """[B, T - 1] log-probabilities of input_ids[:, 1:] under a causal language model, 0 where `scored` [B, T - 1] is
    false. `whole_logits`: [B, T, vocabulary] at once, as many loops have them; else in chunks."""
    hidden = causal.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    head = causal.get_output_embeddings()
    if whole_logits:
        logps = head(hidden[:, :-1]).float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        return torch.where(scored, logps, 0.0)
    cap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
    return log_probs(hidden[:, :-1], head, input_ids[:, 1:], mask=scored, options=LogitOptions(softcap=cap))
