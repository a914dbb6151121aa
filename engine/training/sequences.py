"""Sums and means over the trainable tokens of each trajectory of a micro-batch.

Called by `losses.py` and `corrections.py`. A trajectory is one row: of a rollout whose history was rewritten, each
segment counts for itself, since it was sampled after a prompt of its own. A row never spans two micro-batches.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Which trajectory each token is of."""

    of_token: Tensor
    """[tokens] int64, from 0 to trajectories - 1"""
    trajectories: int

    def sums(self, values: Tensor) -> Tensor:
        """[tokens] to [trajectories]"""
        return values.new_zeros(self.trajectories).index_add(0, self.of_token, values)

    def means(self, values: Tensor) -> Tensor:
        """[tokens] to [trajectories]; 0 for a row without tokens."""
        lengths = torch.bincount(self.of_token, minlength=self.trajectories)
        return self.sums(values) / lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[trajectories] to [tokens]: every token gets its trajectory's."""
        return values[self.of_token]
