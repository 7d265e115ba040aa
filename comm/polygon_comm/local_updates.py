"""Local updates: regions train by themselves for some steps, then average how far they came.

Every H steps each region sends the difference between the weights it started from and those it has (the outer
gradient), packed and with error feedback; the weighted mean goes into Nesterov's momentum, and all regions start from
the same weights again. The traffic between regions is H times less than with a sum of gradients every step.

An exchange may be under way while the regions train on: what a region does meanwhile is added to what comes out of it.

References
----------
Douillard et al., arXiv:2311.08105 (DiLoCo): outer Nesterov with rate 0.7 and momentum 0.9.
Douillard et al., arXiv:2501.18512 (Streaming DiLoCo): fragments in turn, overlapped with training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polygon_comm.line import Pending
from polygon_comm.reduction import SumGroup


class OuterUpdate:
    r"""The outer optimizer of one vector of weights.

    .. math:: \Delta = \sum_r w_r (\theta - \theta_r), \quad m \gets \mu m + \Delta, \quad
              \theta \gets \theta - \eta (\Delta + \mu m), \quad \theta_r \gets \theta + (\theta_r' - \theta_r)

    with :math:`\theta_r` a region's weights when the exchange began and :math:`\theta_r'` those it has when it ends.

    Parameters
    ----------
    name : str
    weights : tensor
        The region's weights, or those of them that this rank updates; changed in place by the inner optimizer and by
        `apply`.
    group : SumGroup
        All holders of the weights.
    fraction : float
        :math:`w_r`: the part of the samples that this rank's region computes.
    shapes : sequence of shapes
        Of the tensors that lie in the vector.
    rate, momentum : float
        :math:`\eta` and :math:`\mu`. 1 and 0: plain averaging.
    part : slice
        Which of the region's weights these are.
    whole : callable
        Gives a vector as long as all of them, of which each of the region's holders has such a part; a collective of
        theirs.
    """

    def __init__(
        self,
        name: str,
        weights: torch.Tensor,
        group: SumGroup,
        fraction: float,
        shapes: Sequence[Sequence[int]],
        *,
        rate: float,
        momentum: float,
        part: slice = slice(None),
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    ) -> None:
        self.name, self.weights, self.fraction = name, weights, fraction
        self.start = weights.clone()
        self.momentum = torch.zeros_like(weights)
        self._part, self._whole = part, whole
        self._group, self._shapes, self._rate, self._decay = group, shapes, rate, momentum

    def restart(self) -> None:
        """Take the weights as they are for those that all regions have (after a checkpoint was loaded)."""
        self.start.copy_(self.weights)

    def begin(self, sent: torch.Tensor) -> Pending:
        """Start to average with the other regions; the call of the result ends it. A collective of the group.

        Parameters
        ----------
        sent : tensor
            A copy of the weights; these themselves may change until the end.
        """
        # The outer gradient: where the region began less where it came to, by its part of the samples, so that a sum is
        # the mean.
        delta = self._whole((self.start - sent).mul_(self.fraction))
        under_way = self._group.begin(delta, f"outer {self.name}", self._shapes, replicated=True)

        def finish() -> None:
            # Nesterov's m <- d m + g, w <- w - r (g + d m), on weights that all regions had.
            own = delta[self._part]
            self.momentum.mul_(self._decay).add_(own)
            self.start.sub_(own.add_(self.momentum, alpha=self._decay), alpha=self._rate)
            # What was trained while the exchange was under way is kept, on top of the new start.
            self.weights.sub_(sent).add_(self.start)

        return under_way.then(finish)

    def begin_now(self) -> Pending:
        """Start to average the weights as they are."""
        return self.begin(self.weights.clone())

    def apply(self) -> None:
        """Average with the other regions and start anew; a collective of the group."""
        self.begin_now()()
