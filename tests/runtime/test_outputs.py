"""On which side of an engine's outputs a tensor lies."""

from __future__ import annotations

import gc
import weakref

import torch

from ds_hilore.runtime.outputs import OutputMarks


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def test_what_follows_an_output() -> None:
    hidden = leaf() * 2
    output = hidden.exp()
    marks = OutputMarks()
    marks.mark(output)
    far = (output + leaf().sin()).log().sum()
    assert marks.follow(far) and marks.follow(output * 1)
    assert not marks.follow(output)  # the output itself
    assert not marks.follow(hidden)  # on the way to it
    assert not marks.follow(leaf()) and not marks.follow(leaf() * 3)


def test_marks_belong_to_one_engine() -> None:
    output = leaf() * 2
    one, other = OutputMarks(), OutputMarks()
    one.mark(output)
    assert one.follow(output * 1) and not other.follow(output * 1)
    other.mark(output)
    assert one.follow(output * 1) and other.follow(output * 1)


def test_structures_are_walked_as_deepspeed_walks_them() -> None:
    first, second, third, plain = leaf() * 2, leaf() * 3, leaf() * 4, leaf()
    marks = OutputMarks()
    marks.mark({"a": first, "b": [second, (third, "text", None)], "c": plain})
    assert all(marks.follow(tensor * 1) for tensor in (first, second, third))
    assert not marks.follow(plain * 1)  # DeepSpeed hooks no leaf


def test_outputs_of_one_node_are_told_apart() -> None:
    left, right = (leaf() * 1).split(2)
    marks = OutputMarks()
    marks.mark(right)
    assert marks.follow(right * 1) and not marks.follow(left * 1)
    assert marks.follow(left + right)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def test_marks_keep_no_graph_alive() -> None:
    output = Identity.apply(leaf())
    node = weakref.ref(output.grad_fn)
    marks = OutputMarks()
    marks.mark(output)
    assert marks.follow(output * 1)
    del output
    gc.collect()
    assert node() is None
