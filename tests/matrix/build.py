"""The model, the DeepSpeed JSON and the loss of one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import models
from tests.engines import config
from tests.models import HIDDEN, VOCAB, decoder_layers, lora

#: Token ids of an image and of its frame in the vision-language model.
IMAGE, VISION_START, VISION_END = 500, 501, 502


def qwen3_moe(layers: int = 2, **config: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN, "head_dim": HIDDEN // 4}
    sizes = {**models._dense(layers, HIDDEN), **experts, "output_router_logits": True}
    return models._build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **config), seed=0)


def mistral(layers: int = 2, **config: Any) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {**models._dense(layers, HIDDEN), "sliding_window": 8}
    return models._build(MistralForCausalLM, MistralConfig(**sizes, **config), seed=0)


def qwen2_5_vl(layers: int = 2, **config: Any) -> nn.Module:
    """Two vision blocks and `layers` decoder layers; an image of 8 x 8 patches is 16 tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    text = {**models._dense(layers, HIDDEN), "rope_parameters": sections, **config}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [1],
    }
    frame = {"image_token_id": IMAGE, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    attention = {"attn_implementation": config["attn_implementation"]} if "attn_implementation" in config else {}
    made = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **frame, **attention)
    return models._build(Qwen2_5_VLForConditionalGeneration, made, seed=0)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    **models.FAMILIES,
    "qwen3_moe": qwen3_moe,
    "mistral": mistral,
    "qwen2_5_vl": qwen2_5_vl,
}


def build_model(cell: Mapping[str, str]) -> nn.Module:
    """The same weights at every call."""
    dropout = float(cell["dropout"])
    special: dict[str, Any] = {"attn_implementation": cell["attention"], "attention_dropout": dropout}
    model = FAMILIES[cell["family"]](**special)
    if cell["training"] == "quantised":
        _quantise(model)
    if cell["training"] != "full":
        model = lora(model, targets=_targets(model), lora_dropout=dropout)
    if cell["compiled"] == "mlp":
        for layer in decoder_layers(model):
            layer.mlp.compile(backend="aot_eager")  # type: ignore[operator, union-attr]
    return model


def _targets(model: nn.Module) -> list[str]:
    """Linear layers within decoder layers. What carries the image keeps its weights, and so do experts: peft has no
    dropout for those that are fused."""
    left_out = ("visual", "expert")
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in path and not any(word in path for word in left_out)
    ]


def _quantise(model: nn.Module) -> None:
    """What `BitsAndBytesConfig(load_in_4bit=True)` does to a model's linear layers within decoder layers."""
    import bitsandbytes as bnb

    for path in _targets(model):
        parent, _, own = path.rpartition(".")
        linear: Any = model.get_submodule(path)
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4"
        )
        made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made)
        if linear.bias is not None:
            made.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        setattr(model.get_submodule(parent), own, made.to("cpu"))


def build_settings(cell: Mapping[str, str]) -> dict[str, Any]:
    """The DeepSpeed JSON."""
    offload = {
        "none": {},
        "optimizer": {"offload_optimizer": {"device": "cpu"}},
        "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }[cell["offload"]]
    precision = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }[cell["precision"]]
    return config(int(cell["zero"]), int(cell["accumulation"]), **offload) | precision


def loss_of(cell: Mapping[str, str]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """A loss over an engine, token ids and advantages."""
    if cell["family"] != "qwen2_5_vl":
        return models.plain_loss
    # Under ZeRO-3 the vision tower's parameters are gathered by all ranks or by none.
    sees = dist.get_rank() == 0 or cell["zero"] == "3"

    def loss(made: Any, ids: Tensor, advantages: Tensor) -> Tensor:
        return models.plain_loss(_Seeing(made) if sees else made, ids, advantages)

    return loss


class _Seeing:
    """An engine that is shown an image in front of each row's text."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        rows = len(input_ids)
        grid = torch.tensor([[1, 8, 8]] * rows)
        generator = torch.Generator().manual_seed(int(input_ids.sum()))
        pixels = torch.randn(rows * 64, 3 * 2 * 14 * 14, generator=generator)
        image = torch.tensor([[VISION_START, *[IMAGE] * 16, VISION_END]]).expand(rows, -1)
        text = input_ids.clamp(max=VOCAB - 20)  # no token of an image's
        shown = torch.cat([image, text], dim=1)
        output = self._engine(
            input_ids=shown,
            mm_token_type_ids=(shown == IMAGE).int(),
            pixel_values=pixels,
            image_grid_thw=grid,
            use_cache=use_cache,
        )
        output.logits = output.logits[:, image.shape[1] :]
        return output
