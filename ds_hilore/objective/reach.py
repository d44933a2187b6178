"""Exposures of units whose state reaches different tokens, and codec errors weighted by what they reach (design
section 3: S of E_u, and the token-resolved form).

State at position p matters for the token that p predicts, and through attention for later ones of its segment. A token
that sees n positions takes about 1 / n of what it sees from each, so

    w_p = |omega_p| + sum over later tokens t that state at p reaches of |omega_t| / n_t
    E   = sqrt(sum_p w_p^2)

n_t counts the positions that t sees: those of its segment up to its own, or a window of them. Errors of positions add
in squares, as those of units and microbatches do, so that splitting a microbatch changes no risk. Measured (6 layers of
SmolLM2-135M with LoRA, int8 MLP and bf16 attention of layers 0, 3 and 5, 20 microbatches of varied length, magnitude
and pattern of omega): gradient errors scatter around kappa E e by 0.20 to 0.31 in logarithm; by 0.54 to 0.65 with
E = sum |omega|, by 0.21 to 0.39 with sqrt(sum omega^2), by 0.69 to 0.79 where own positions count 1 / n_t.

How far state reaches is the same for every microbatch: a `Reach`. Many units share one, so a microbatch needs only the
exposures of the *distinct* ones, which come as one tensor on the device and cost one copy to the host:

    distinct = tuple(dict.fromkeys(reach_of_unit.values()))
    values = exposures(omega, distinct, mask, segment_ids)        # [len(distinct)]

omega is laid out by position, as in exposure.py: column t holds the coefficient of the token that position t predicts.
Positions count from the start of their segment. Left padding is a segment of its own, else it counts as reaching.
"""

# B rows, T positions

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hilore.core.errors import UsageError
from ds_hilore.objective.exposure import magnitude_of, next_segment

#: Keeps the relative error of state that is all zeros finite (design section 3, e).
_TINY = 1e-8


@dataclass(frozen=True)
class Reach:
    """Which tokens the state of a unit reaches: from each of its positions, `span` positions on.

    Args:
        span: positions that state at one position reaches within its segment, that position counted in. None: all that
            follow (full causal attention); 1: its own only.
        route: name of the positions that the unit has state of, if not of all: an expert's own tokens. It is looked up
            in the `routes` of a microbatch.

    Raises:
        UsageError: `span` is below 1.
    """

    span: int | None = None
    route: str | None = None

    def __post_init__(self) -> None:
        if self.span is not None and self.span < 1:
            raise UsageError(f"state reaches its own position at least: span must be >= 1 or None, got {self.span}")

    @classmethod
    def through(cls, windows: Iterable[int | None], route: str | None = None) -> Reach:
        """Gives the reach of state that passes these attentions, one after another.

        Args:
            windows: of each, the positions that a query sees, its own counted in (as `sliding_window` of
                transformers); None: all. Inputs of a decoder layer pass its own attention and those of later layers;
                state of its MLP only those of later layers, so that none is left in the last layer.
            route: as in the class.
        """
        known = list(windows)
        # each window adds the positions behind the own one
        span = None if None in known else 1 + sum(window - 1 for window in known if window is not None)
        return cls(span, route)


#: All positions that follow: any state below some attention without a window.
CAUSAL = Reach()
#: Its own position only: the MLP of the last layer, the final norm.
OWN_POSITION = Reach(span=1)


def exposures(
    omega: Tensor,
    reaches: Sequence[Reach],
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    routes: Mapping[str, Tensor] | None = None,
    before: int = 0,
) -> Tensor:
    """E of each reach (see the module), [len(reaches)] float64. NaN at a live token stays NaN.

    With a route only its positions have state, so squares of experts' exposures add up to that of all tokens.

    Args:
        omega: [B, T].
        reaches: the distinct ones; what is given twice is computed twice.
        mask: [B, T] bool or 0/1, true where live. None: everywhere.
        segment_ids: [B, T] integers, equal within a segment and different between neighbours. None: each row is one
            segment.
        routes: [B, T] bool or 0/1 by name: where the unit has state.
        before: positions of each row before its first column, where omega begins behind a prompt. They have state, but
            for routes; with `segment_ids` there are none.

    Raises:
        UsageError: shapes differ, or a route is not given.

    Source: design section 3, E_u and "Token-resolved form".
    """
    if segment_ids is not None:
        before = 0
    found = []
    for reach in reaches:
        square = token_weights(omega, reach, mask, segment_ids, routes, before).square().sum()
        if before and reach.route is None:
            square = square + _weights_before(omega, reach, mask, before).square().sum()
        found.append(square.sqrt())
    return torch.stack(found) if found else omega.new_zeros(0, dtype=torch.float64)


def token_weights(
    omega: Tensor,
    reach: Reach = CAUSAL,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    routes: Mapping[str, Tensor] | None = None,
    before: int = 0,
) -> Tensor:
    """w_p (see the module), [B, T] float64; 0 where the unit has no state. Args and Raises as `exposures`.

    Source: design section 3, "Token-resolved form".
    """
    magnitude = magnitude_of(omega, mask).double()
    position = torch.arange(omega.shape[1], device=omega.device).expand(omega.shape)
    end = torch.full_like(position, omega.shape[1]) if segment_ids is None else next_segment(_like(segment_ids, omega))
    if reach.span is not None:
        end = torch.minimum(end, position + reach.span)
    taken = magnitude / _seen(reach, position, segment_ids, before)
    suffix = torch.cat([taken.flip(1).cumsum(1).flip(1), taken.new_zeros(len(taken), 1)], 1)
    # a scan on a GPU may round neighbours in different directions
    later = (suffix[:, 1:] - suffix.gather(1, end)).clamp(min=0)
    weights = magnitude + later
    return weights if reach.route is None else weights * (_route(reach, omega, routes) != 0)


def _weights_before(omega: Tensor, reach: Reach, mask: Tensor | None, before: int) -> Tensor:
    """w of the positions before the first column, nearest first, [B, <= before]: without those that reach nothing."""
    tokens = omega.shape[1]
    position = torch.arange(tokens, device=omega.device).expand(omega.shape)
    taken = magnitude_of(omega, mask).double() / _seen(reach, position, None, before)
    if reach.span is None:
        return taken.sum(1, keepdim=True).expand(-1, before)
    behind = torch.arange(1, min(before, reach.span - 1) + 1, device=omega.device)
    up_to = torch.cat([taken.new_zeros(len(taken), 1), taken.cumsum(1)], 1)
    return up_to[:, (reach.span - behind).clamp(max=tokens)]


def token_weighted_error(
    row_error_square: Tensor, row_value_square: Tensor, weights: Tensor, position_axis: int = 1
) -> Tensor:
    """Relative error of a state tensor with each position counted by its weight, 0-dim float64.

        e = sqrt(mean_p w_p |x_hat_p - x_p|^2) / (sqrt(mean_p w_p |x_p|^2) + 1e-8),    w relative to its own mean

    so equal weights give the e of design section 3, scaling all weights changes nothing, and a position of weight 0
    counts neither for nor against, whatever it holds (padding, NaN). 0 where all weights are 0.

    Args:
        row_error_square, row_value_square: squares summed over each row of a codec, [B, T], or with further axes
            (heads, groups) that are added up: [B, T, ...] or, with `position_axis=2`, [B, heads, T]. Rows that the
            codec flattened are viewed as [B, T] first.
        weights: [B, T] >= 0: `token_weights`, or `exposure.reach_weights`.
        position_axis: which axis T is; the first is B.

    Raises:
        UsageError: the shapes do not belong together.

    Source: design section 3, "Token-resolved form".
    """
    rows = row_error_square
    axis = position_axis % max(1, rows.dim())
    belongs = rows.dim() >= 2 and axis > 0 and (rows.shape[0], rows.shape[axis]) == tuple(weights.shape)
    if not belongs or row_value_square.shape != rows.shape:
        raise UsageError(
            f"rows {tuple(rows.shape)} and {tuple(row_value_square.shape)} with positions on axis {position_axis} do "
            f"not belong to weights {tuple(weights.shape)}; the first axis and that one must be [rows, tokens]"
        )
    wide = weights.detach().double()
    relative = wide * (wide.numel() / wide.sum())

    def root_of_sum(squares: Tensor) -> Tensor:
        other = [each for each in range(squares.dim()) if each not in (0, axis)]
        at_position = squares.detach().double().sum(other) if other else squares.detach().double()
        # selected, not multiplied: without any weight, `relative` is not a number either
        return torch.where(wide != 0, relative * at_position, 0.0).sum().sqrt()

    return root_of_sum(row_error_square) / (root_of_sum(row_value_square) + _TINY)


def _seen(reach: Reach, position: Tensor, segment_ids: Tensor | None, before: int) -> Tensor:
    """n_t: positions that each token sees, [B, T]."""
    seen = position + 1 + before
    if segment_ids is not None:
        starts = torch.ones_like(segment_ids, dtype=torch.bool)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        seen = seen - torch.where(starts, position, 0).cummax(1).values
    return seen if reach.span is None else seen.clamp(max=reach.span)


def _like(segment_ids: Tensor, omega: Tensor) -> Tensor:
    if segment_ids.shape != omega.shape:
        raise UsageError(f"segment_ids {tuple(segment_ids.shape)} must have the shape of omega {tuple(omega.shape)}")
    return segment_ids


def _route(reach: Reach, omega: Tensor, routes: Mapping[str, Tensor] | None) -> Tensor:
    assert reach.route is not None
    if routes is None or reach.route not in routes:
        raise UsageError(f"the positions of route {reach.route!r} are not given; known: {sorted(routes or ())}")
    route = routes[reach.route]
    if route.shape != omega.shape:
        raise UsageError(
            f"route {reach.route!r} {tuple(route.shape)} must have the shape of omega {tuple(omega.shape)}"
        )
    return route
