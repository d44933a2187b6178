"""Chunked log-probabilities against the plain path: values, all gradients, memory, work and borders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.chunked import LogitOptions, log_probs
from ds_hilore.objective.head import PLAIN, HeadPlan, WholeHead, default_chunk_tokens
from tests.objective.cases import Watch, Watcher, untimed

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    mask: Tensor
    trainable: tuple[bool, bool, bool]  # hidden, weight, bias
    with_entropy: bool
    options: LogitOptions


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    lead = draw(st.sampled_from([(1,), (7,), (2, 5), (3, 1), (2, 3, 4), (0,), (2, 0)]))
    width, vocab = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 17, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        hidden=normal(*lead, width),
        weight=normal(vocab, width),
        bias=normal(vocab) if draw(st.booleans()) else None,
        ids=torch.randint(vocab, lead, generator=generator),
        mask=torch.rand(lead, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0])),
        trainable=(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
        with_entropy=draw(st.booleans()),
        options=LogitOptions(
            temperature=draw(st.sampled_from([1.0, 0.7, 2.0])),
            softcap=draw(st.sampled_from([None, 2.5])),
            chunk_tokens=draw(st.sampled_from([None, 1, 3, 1000])),
            entropy_grad=draw(st.booleans()),
        ),
    )


def plain(case: Case, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """The whole [tokens, vocab] at once."""
    z = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    if case.options.softcap is not None:
        z = case.options.softcap * torch.tanh(z / case.options.softcap)
    logp = (z / case.options.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = logp.gather(-1, case.ids[..., None]).squeeze(-1)
    values = [picked, entropy if case.options.entropy_grad else entropy.detach()]
    return [torch.where(case.mask, value, 0.0) for value in values[: 1 + case.with_entropy]]


def chunked(case: Case, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    values = log_probs(
        hidden, weight, case.ids, bias=bias, mask=case.mask, with_entropy=case.with_entropy, options=case.options
    )
    return list(values) if isinstance(values, tuple) else [values]


def values_and_gradients(path: Any, case: Case) -> list[Tensor]:
    """Outputs, then gradients of a random functional of all of them."""
    leaves = [
        None if leaf is None else leaf.clone().requires_grad_(wanted)
        for leaf, wanted in zip((case.hidden, case.weight, case.bias), case.trainable)
    ]
    values = path(case, *leaves)
    generator = torch.Generator().manual_seed(1)
    total = sum((v * torch.randn(v.shape, generator=generator, dtype=torch.float64)).sum() for v in values)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = torch.autograd.grad(total, wanted) if wanted else ()
    assert [g.dtype for g in gradients] == [leaf.dtype for leaf in wanted]
    return [*(v.detach() for v in values), *gradients]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Against the largest entry, taken as at least 0.01.

    The terms of a gradient are of size one here, and where they cancel further than that, 1e-5 of what is left would be
    less than one rounding of a term: neither path has those digits (both miss float64 by as much).
    """
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2)).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(data=st.data())
@untimed(max_examples=150)
def test_values_and_all_gradients_are_those_of_the_plain_path(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    found, expected = values_and_gradients(chunked, case), values_and_gradients(plain, case)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= TOLERANCE[dtype]


@given(cases(torch.float64), st.sampled_from([math.nan, math.inf]))
@untimed(max_examples=100)
def test_masked_positions_leak_nothing(case: Case, garbage: float) -> None:
    dirty = replace(
        case,
        hidden=torch.where(case.mask[..., None], case.hidden, garbage),
        ids=torch.where(case.mask, case.ids, -100),
    )
    clean = values_and_gradients(chunked, case)
    for ours, theirs in zip(values_and_gradients(chunked, dirty), clean):
        assert torch.equal(ours, theirs)
    assert not clean[0][~case.mask].any()


def medium(dtype: torch.dtype = torch.float32, **change: Any) -> Case:
    generator = torch.Generator().manual_seed(5)
    normal = [torch.randn(shape, generator=generator) for shape in ((4, 16, 24), (640, 24), (640,))]
    case = Case(
        hidden=normal[0].to(dtype),
        weight=(normal[1] / 5).to(dtype),
        bias=normal[2].to(dtype),
        ids=torch.randint(640, (4, 16), generator=generator),
        mask=torch.rand(4, 16, generator=generator) < 0.5,
        trainable=(True, True, True),
        with_entropy=False,
        options=LogitOptions(chunk_tokens=8),
    )
    return replace(case, **change)


@pytest.mark.parametrize("trainable", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_bfloat16_is_no_worse_than_the_plain_path(trainable: tuple[bool, bool, bool], with_entropy: bool) -> None:
    """Both against float64 on the same bfloat16 inputs; rounding of the logits themselves is common to both."""
    case = medium(torch.bfloat16, trainable=trainable, with_entropy=with_entropy)
    wide = replace(case, hidden=case.hidden.double(), weight=case.weight.double(), bias=case.bias.double())
    truth = values_and_gradients(plain, wide)
    theirs, ours = values_and_gradients(plain, case), values_and_gradients(chunked, case)
    for a, b, exact in zip(ours, theirs, truth):
        assert (a.double() - exact).norm() <= 1.25 * (b.double() - exact).norm() + 1e-6 * exact.norm()
    assert relative_error(ours[0], theirs[0]) <= 1e-5
    assert ours[0].dtype == torch.float32


def test_the_head_gradient_is_summed_in_float32() -> None:
    """1,024 chunks that each add 1: a bfloat16 sum would stay at 256."""
    hidden, weight = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    ids = torch.zeros(1024, dtype=torch.int64)
    log_probs(hidden, weight, ids, options=LogitOptions(chunk_tokens=1)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


def test_autocast_is_that_of_a_plain_head() -> None:
    case = medium()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = values_and_gradients(plain, case), values_and_gradients(chunked, case)
    assert relative_error(ours[0], theirs[0]) <= 1e-5
    for a, b in zip(ours[1:], theirs[1:]):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.01 * b.norm()


# --- Memory and work.


def watch(case: Case, backward: bool = True) -> tuple[Watch, Watch]:
    """What forward and backward do. Live positions come as `rows`, so that nothing is counted on the device."""
    rows = case.mask.flatten().nonzero().squeeze(1)
    leaves = [t.clone().requires_grad_(r) for t, r in zip((case.hidden, case.weight), case.trainable)]
    with Watcher() as forward:
        values = log_probs(*leaves, case.ids, rows=rows, with_entropy=case.with_entropy, options=case.options)
    with Watcher() as behind:
        if backward:
            (values[0] if case.with_entropy else values).sum().backward()
    return forward.seen, behind.seen


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("head", [False, True])
def test_no_tensor_of_tokens_by_vocab_exists(head: bool, softcap: float | None, with_entropy: bool) -> None:
    options = LogitOptions(chunk_tokens=4, softcap=softcap, temperature=0.5)
    case = medium(trainable=(True, head, False), with_entropy=with_entropy, options=options)
    live = int(case.mask.sum())
    vocab, width = case.weight.shape
    for seen in watch(case):
        assert 0 < seen.largest <= max(4 * vocab, vocab * width) < live * vocab
        assert seen.host_reads == []


@pytest.mark.parametrize(
    ("positions", "chunk"),
    [(700, 128), (2048, 256), (2800, 341)],  # a small batch; an eighth of the positions; 64 MiB of logits
)
def test_default_chunks(positions: int, chunk: int) -> None:
    hidden, weight = torch.zeros(positions, 1), torch.zeros(49_152, 1)
    with Watcher() as watcher:
        log_probs(hidden, weight, torch.zeros(positions, dtype=torch.int64))
    assert watcher.seen.largest == chunk * 49_152
    assert watcher.seen.products == math.ceil(positions / chunk)


@given(st.integers(128, 5000), st.integers(2, 400_000), st.data())
def test_the_largest_chunk_is_the_same_for_every_live_share_from_an_eighth(
    positions: int, vocabulary: int, data: st.DataObject
) -> None:
    """Else a plan that was made when few tokens were live would promise too low a peak."""
    head = WholeHead(torch.empty(vocabulary, 0), None, HeadPlan(PLAIN, torch.float32))
    live = data.draw(st.integers(max(128, math.ceil(positions / 8)), positions))
    spans = head.spans(live, positions)
    assert [token for span in spans for token in range(span.start, span.stop)] == [*range(live)]
    assert max(span.stop - span.start for span in spans) == default_chunk_tokens(vocabulary, positions)


@pytest.mark.parametrize(
    ("trainable", "with_entropy", "entropy_grad", "forward", "backward"),
    [
        ((True, False), False, True, 2, 0),  # LoRA: the slope is made in forward
        ((True, False), True, False, 2, 0),  # entropies as a metric cost no product
        ((True, False), True, True, 1, 2),
        ((True, True), False, True, 1, 3),
        ((False, True), False, True, 1, 2),
    ],
)
def test_products_per_chunk(
    trainable: tuple[bool, bool], with_entropy: bool, entropy_grad: bool, forward: int, backward: int
) -> None:
    """32 live positions of 64 in chunks of 8: masked ones are in no product."""
    mask = torch.arange(64).view(4, 16) % 2 == 0
    options = LogitOptions(chunk_tokens=8, entropy_grad=entropy_grad)
    case = medium(mask=mask, trainable=(*trainable, False), with_entropy=with_entropy, options=options)
    seen = watch(case)
    assert (seen[0].products, seen[1].products) == (4 * forward, 4 * backward)


def test_no_grad_makes_no_slopes() -> None:
    case = medium(mask=torch.ones(4, 16, dtype=torch.bool), trainable=(True, False, False))
    with torch.no_grad():
        seen, _ = watch(case, backward=False)
    assert seen.products == 64 // 8


# --- Heads and callers.


def test_rows_name_live_positions_in_any_order() -> None:
    case = medium(torch.float64)
    rows = case.mask.flatten().nonzero().squeeze(1).flip(0)
    by_mask = log_probs(case.hidden, case.weight, case.ids, mask=case.mask)
    torch.testing.assert_close(log_probs(case.hidden, case.weight, case.ids, rows=rows), by_mask, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "tied"])
def test_a_module_is_called_through_its_hooks_and_left_as_found(kind: str) -> None:
    case = medium(torch.float64)
    head: nn.Module = nn.Linear(24, 640, dtype=torch.float64) if kind == "linear" else nn.Embedding(640, 24)
    head.to(torch.float64)
    calls: list[str] = []
    head.register_forward_pre_hook(lambda *_: calls.append("before"))
    head.register_forward_hook(lambda *_: calls.append("after"))
    head.register_full_backward_hook(lambda *_: calls.append("backward"))
    hidden = case.hidden.clone().requires_grad_()
    found = log_probs(hidden, head, case.ids, mask=case.mask)
    found.sum().backward()
    assert calls == ["before", "after", "backward"]
    assert "forward" not in head.__dict__
    expected = log_probs(case.hidden, head.weight, case.ids, mask=case.mask, bias=getattr(head, "bias", None))
    assert torch.equal(found, expected)
    assert head.weight.grad is not None
    ids = torch.zeros(2, 24, dtype=torch.int64)
    assert head(case.hidden if kind == "linear" else ids).shape[-1] == (640 if kind == "linear" else 24)


def test_a_forward_that_a_host_has_put_there_comes_back_after_an_error() -> None:
    head = nn.Linear(3, 5)
    wrapper = head.forward
    head.forward = wrapper  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
        log_probs(torch.zeros(2, 3), head, torch.tensor([0, 7]))
    assert head.__dict__["forward"] is wrapper


def test_gather_is_entered_once_and_only_in_forward() -> None:
    case, entered = medium(), []

    @contextmanager
    def gather(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        entered.append(list(parameters))
        whole = [p.data for p in parameters]
        head.weight.data = weight
        yield
        for parameter, data in zip(parameters, whole):
            parameter.data = data

    head = nn.Linear(24, 640, bias=False).requires_grad_(False)
    weight = head.weight.data
    head.weight.data = torch.empty(0)
    hidden = case.hidden.clone().requires_grad_()
    log_probs(hidden, head, case.ids, options=LogitOptions(gather=gather)).sum().backward()
    assert len(entered) == 1 and entered[0][0] is head.weight
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    with pytest.raises(UsageError, match="ZeRO-3"):
        log_probs(case.hidden, head, case.ids)
    with pytest.raises(UsageError, match="frozen heads"):
        log_probs(case.hidden, head.requires_grad_(True), case.ids, options=LogitOptions(gather=gather))


@pytest.mark.parametrize("trainable", [(True, False, False), (True, True, True)])
def test_backward_may_run_twice_where_the_graph_is_kept(trainable: tuple[bool, bool, bool]) -> None:
    case = medium(torch.float64, trainable=trainable)
    leaves = [t.clone().requires_grad_(r) for t, r in zip((case.hidden, case.weight), trainable)]
    total = log_probs(*leaves, case.ids, mask=case.mask).sum()
    first = torch.autograd.grad(total, leaves[0], retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(total, leaves[0])[0], first)


def test_one_of_two_outputs_may_go_unused() -> None:
    case = medium(torch.float64)
    for used in (0, 1):
        hidden, other = (case.hidden.clone().requires_grad_() for _ in range(2))
        both = log_probs(hidden, case.weight, case.ids, with_entropy=True)
        both[used].sum().backward()
        everywhere = replace(case, mask=torch.ones_like(case.mask), with_entropy=True)
        plain(everywhere, other, case.weight, None)[used].sum().backward()
        assert hidden.grad is not None and other.grad is not None
        assert relative_error(hidden.grad, other.grad) <= 1e-10


def test_hidden_states_need_not_be_contiguous() -> None:
    case = medium(torch.float64)
    turned = case.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(log_probs(turned, case.weight, case.ids), log_probs(case.hidden, case.weight, case.ids))


def test_changing_the_head_before_backward_is_noticed() -> None:
    case = medium()
    weight = case.weight.clone().requires_grad_()
    total = log_probs(case.hidden, weight, case.ids).sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "does not fit ids"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.int64)}, "must be floating"),
        ({"mask": torch.ones(3)}, "mask"),
        ({"mask": torch.ones(2), "rows": torch.tensor([0])}, "pass one of them"),
        ({"rows": torch.tensor([0.0])}, "1-D int64"),
        ({"head": torch.zeros(5, 3, dtype=torch.bfloat16)}, "use autocast"),
        ({"head": torch.zeros(0)}, "ZeRO-3"),
        ({"head": nn.Sequential(nn.Linear(3, 5))}, "LoRA adapter"),
        ({"head": nn.Linear(3, 5), "bias": torch.zeros(5)}, "read from the head module"),
    ],
)
def test_wrong_arguments_name_their_fault(change: dict[str, Any], fault: str) -> None:
    arguments = {
        "hidden": torch.zeros(2, 3),
        "head": torch.zeros(5, 3),
        "ids": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(UsageError, match=fault):
        log_probs(**arguments)


@pytest.mark.parametrize("name", ["temperature", "softcap", "chunk_tokens"])
def test_options_must_be_positive(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=0"):
        LogitOptions(**{name: 0})
