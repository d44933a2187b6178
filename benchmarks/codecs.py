"""Speed, size and error of each codec.

    python -m benchmarks.codecs [--device cpu] [--threads 2] [--rounds 15] [--json FILE]

Seconds are medians over rounds in which all codecs and a plain copy take turns. Throughput is bytes of the *input* per
second. The share of copy bandwidth compares memory traffic: what a codec must at least read and write (input and
payload) per second, over what a copy reads and writes per second. Inputs take turns, so that caches do not hold them.
Errors are of normal values and of values whose channels differ in size (lognormal, sigma 1), relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_hilore.codecs.base import Codec
from ds_hilore.codecs.registry import codec_named, codec_names

#: One token's hidden size and MLP width of SmolLM2-135M, and 2,048 tokens.
HIDDEN, WIDTH, TOKENS = 576, 1536, 2048

#: (rows, row length): one MLP tensor, and gate and up of one layer together.
SHAPES = ((TOKENS, WIDTH), (TOKENS, 2 * WIDTH))

#: Inputs that take turns fill at least this: more than the last cache of either kind of device.
BYTES_IN_TURN = {"cpu": 96 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class Measurement:
    """One codec on one kind of tensor. Bytes per second are of the input; shares are of a copy's memory traffic."""

    codec: str
    dtype: str
    shape: tuple[int, int]
    encode_s: float
    decode_s: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_copy_share: float
    decode_copy_share: float
    ratio: float
    error_normal: float
    error_channels: float


class Timer:
    """Seconds of one call on a device, its end waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object]) -> float:
        if self._device.type == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # lets the host run ahead, so that launches are not what is timed
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def normal(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def with_channels(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values whose channels differ in size, as activations' do."""
    rng = torch.Generator().manual_seed(1)
    return (torch.randn(shape, generator=rng) * torch.randn(shape[1], generator=rng).exp()).to(device, dtype)


def measure(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rounds: int) -> list[Measurement]:
    """All codecs that take `dtype`, in turns."""
    codecs = [codec for codec in map(codec_named, codec_names()) if codec.supports(dtype)]
    one = normal(shape, dtype, device)
    inputs = [one, *(one.clone() for _ in range(max(1, BYTES_IN_TURN[device.type] // one.nbytes)))]
    seconds, timer, target = _Turns(), Timer(device), torch.empty_like(one)
    for turn in range(-2, rounds):  # the first turns warm up
        values = inputs[turn % len(inputs)]
        seconds.add("copy", turn, timer(lambda v=values: target.copy_(v)))
        for codec in codecs:
            seconds.add(codec.name + " encode", turn, timer(lambda c=codec, v=values: c.encode(v)))
            payload = codec.encode(values)
            seconds.add(codec.name + " decode", turn, timer(lambda c=codec, p=payload: c.decode(p, out=target)))
    return [_measurement(codec, shape, dtype, device, seconds) for codec in codecs]


class _Turns:
    """Seconds by name; turns before the first are not kept."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, turn: int, seconds: float) -> None:
        if turn >= 0:
            self._seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return median(self._seconds[name])


def _measurement(
    codec: Codec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seconds: _Turns
) -> Measurement:
    size = shape[0] * shape[1] * dtype.itemsize
    held = codec.payload_bytes(shape, dtype)
    encode, decode = seconds.median(codec.name + " encode"), seconds.median(codec.name + " decode")
    copy_traffic = 2 * size / seconds.median("copy")
    errors = [
        codec.encode(values).relative_error.item()
        for values in (normal(shape, dtype, device, seed=2), with_channels(shape, dtype, device))
    ]
    return Measurement(
        codec=codec.name,
        dtype=str(dtype).removeprefix("torch."),
        shape=shape,
        encode_s=encode,
        decode_s=decode,
        encode_bytes_per_s=size / encode,
        decode_bytes_per_s=size / decode,
        encode_copy_share=(size + held) / encode / copy_traffic,
        decode_copy_share=(size + held) / decode / copy_traffic,
        ratio=held / size,
        error_normal=errors[0],
        error_channels=errors[1],
    )


def scale_errors(group: int = 32) -> dict[str, float]:
    """Relative error of int8 in groups with scales in each dtype, on values with channels: what bfloat16 costs."""
    values = with_channels((TOKENS, WIDTH), torch.float32, torch.device("cpu")).view(-1, group)
    exact = values.abs().amax(1, keepdim=True) / 127
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale = exact.to(dtype).float()
        decoded = (values / scale).round().clamp(-127, 127) * scale
        found[str(dtype).removeprefix("torch.")] = ((decoded - values).norm() / values.norm()).item()
    return found


def replay_seconds(device: torch.device, rounds: int) -> float:
    """Seconds of one forward pass, with gradients, of a decoder layer of SmolLM2-135M's sizes: what a replay costs."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=TOKENS, attn_implementation="sdpa",
    )  # fmt: skip
    layer, rotary = LlamaDecoderLayer(config, 0).to(device), LlamaRotaryEmbedding(config).to(device)
    hidden = torch.randn(8, TOKENS // 8, HIDDEN, device=device, requires_grad=True)
    positions = rotary(hidden, torch.arange(TOKENS // 8, device=device)[None])
    timer = Timer(device)
    return median([timer(lambda: layer(hidden, position_embeddings=positions)) for _ in range(rounds + 2)][2:])


def table(measurements: Sequence[Measurement], title: str) -> Table:
    view = Table(title=title)
    for head in ("codec", "dtype", "shape", "encode", "decode", "GB/s", "of copy", "ratio", "error", "error, channels"):
        view.add_column(head, justify="left" if head in ("codec", "dtype") else "right")
    for m in measurements:
        view.add_row(
            m.codec,
            m.dtype,
            f"{m.shape[0]} x {m.shape[1]}",
            f"{m.encode_s * 1e3:.2f} ms",
            f"{m.decode_s * 1e3:.2f} ms",
            f"{m.encode_bytes_per_s / 1e9:.1f} / {m.decode_bytes_per_s / 1e9:.1f}",
            f"{m.encode_copy_share:.0%} / {m.decode_copy_share:.0%}",
            f"{m.ratio:.3f}",
            f"{m.error_normal:.3%}",
            f"{m.error_channels:.3%}",
        )
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=sorted(BYTES_IN_TURN), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the measurements there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)

    found = [
        measurement
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        for measurement in measure(shape, dtype, device, arguments.rounds)
    ]
    replay, scales = replay_seconds(device, arguments.rounds), scale_errors()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    console = Console(width=140)
    console.print(table(found, f"{name}, {arguments.threads} threads, torch {torch.__version__}"))
    console.print(
        f"replay of a decoder layer (hidden {HIDDEN}, MLP {WIDTH}, {TOKENS} tokens, fp32): {replay * 1e3:.1f} ms"
    )
    both = [m for m in found if m.dtype == "float32" and m.shape == SHAPES[1]]
    for m in both:
        share = (m.encode_s + m.decode_s) / replay
        console.print(
            f"  gate and up by {m.codec}: {(m.encode_s + m.decode_s) * 1e3:.1f} ms, {share:.1%} of the replay"
        )
    console.print("int8 error by dtype of its scales: " + ", ".join(f"{k} {v:.4%}" for k, v in scales.items()))
    if arguments.json is not None:
        record = {
            "device": name,
            "threads": arguments.threads,
            "torch": torch.__version__,
            "replay_s": replay,
            "scale_errors": scales,
            "measurements": [asdict(measurement) for measurement in found],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
