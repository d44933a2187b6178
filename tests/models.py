"""Tiny random decoder models, one builder per family, the same weights for the same seed.

Every family has vocabulary 512, hidden width 64 and 2 to 4 decoder layers. `decoder_layers` gives the modules that are
recovery units by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 512
HIDDEN = 64


def llama(layers: int = 3, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _build(LlamaForCausalLM, LlamaConfig(**_dense(layers, hidden), **config), seed)


def qwen2(layers: int = 3, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _build(Qwen2ForCausalLM, Qwen2Config(**_dense(layers, hidden), **config), seed)


def phi3(layers: int = 3, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return _build(Phi3ForCausalLM, Phi3Config(**_dense(layers, hidden), pad_token_id=0, **config), seed)


def gemma3(layers: int = 3, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    """Norms after attention and MLP, a sliding window of 8 in all layers but every third."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    special = {"head_dim": hidden // 4, "sliding_window": 8, "sliding_window_pattern": 3, **config}
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**_dense(layers, hidden), **special), seed)


def mixtral(layers: int = 2, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    """Mixture of 4 experts, 2 per token, fused into 3-D parameters as transformers 5 does."""
    from transformers import MixtralConfig, MixtralForCausalLM

    special = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, **config}
    return _build(MixtralForCausalLM, MixtralConfig(**_dense(layers, hidden), **special), seed)


def qwen3_next(layers: int = 4, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    """Hybrid: gated delta-net layers with a full-attention layer at every fourth place, mixture-of-experts MLPs."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    special = {
        "head_dim": hidden // 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        **config,
    }
    return _build(Qwen3NextForCausalLM, Qwen3NextConfig(**_dense(layers, hidden), **special), seed)


def gpt_neox(layers: int = 3, hidden: int = HIDDEN, seed: int = 0, **config: Any) -> nn.Module:
    """Attention and MLP in parallel, LayerNorm with bias, fused qkv."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = _dense(layers, hidden)
    del sizes["num_key_value_heads"]
    return _build(GPTNeoXForCausalLM, GPTNeoXConfig(**sizes, **config), seed)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    build.__name__: build for build in (llama, qwen2, phi3, gemma3, mixtral, qwen3_next, gpt_neox)
}


def lora(model: nn.Module, targets: str | list[str] = "all", seed: int = 1, **kw: Any) -> nn.Module:
    """The model under peft LoRA with random (not zero) lora_B, so that every adapter has a gradient.

    Args:
        targets: "all" for every linear layer but the head, or module names.
        kw: passed on to LoraConfig; r defaults to 4.
    """
    from peft import LoraConfig, get_peft_model

    names = "all-linear" if targets == "all" else targets
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        settings = LoraConfig(target_modules=names, task_type="CAUSAL_LM", **{"r": 4, **kw})
        wrapped = get_peft_model(model, settings)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=0.02)
    return wrapped.train()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in forward order: what transformers checkpoints, hence our default units."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def batch(seed: int, rows: int = 2, tokens: int = 16, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Token ids [rows, tokens] int64 and advantages [rows, 1] float32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    return ids.to(device), torch.randn(rows, 1, generator=generator).to(device)


def plain_loss(model: Callable[..., Any], ids: Tensor, adv: Tensor) -> Tensor:
    """-mean(logp * advantage) over all predicted tokens, plus the model's own auxiliary loss where it has one."""
    output = model(input_ids=ids, use_cache=False)
    logps = output.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(logps * adv).mean()
    if getattr(output, "router_logits", None) is not None:
        loss = loss + 0.01 * sum(logits.float().square().mean() for logits in output.router_logits)
    return loss


def _dense(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }


def _build(model_class: Callable[[Any], Any], config: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = model_class(config)
    return model.train()
