"""How large should the large model be?

A run of many FLOPs happens once, and nobody can try widths with it. So small runs come first: for
some smaller numbers of FLOPs, which width has the lowest loss? The best widths follow a law, and so
do their losses. Both say what the large run should be, before anybody pays for it.

Read: Hoffmann et al. 2022 (arXiv:2203.15556), section 3.2, and the documentation of
torch.linalg.lstsq.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def scaling_law(
    train: Callable[[int, int], float],
    flops: Callable[[int, int], int],
    budget: int,
    larger: int,
) -> tuple[int, float]:
    """Return the width that a run of `larger` FLOPs should have, and the loss that it will have
    then.

    train(width, steps) -> the loss after a run. Widths are 1 to 128. The learning rate falls to 0
        during a run, so a run cannot be cut short or go on
    flops(width, steps) -> the FLOPs of a run: 6 for each parameter and token. They grow with width
        times steps
    budget: FLOPs that all runs together may have, and each a tenth of it. `larger` is more
    The loss is a cross entropy, and text has an entropy: no loss is below it, at any width. The
    prediction may be wrong by 0.045 nats, and your width may lose 0.006 nats to the best.
    """
    # >>>
    costs, widths, losses = [], [], []

    def fit(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.lstsq(x, y[:, None]).solution[:, 0]

    for share in (1, 2, 4, 8, 16):  # of 31
        cost = budget * share / 31 / 6  # of each of six runs
        middle = (cost / flops(1, 1) / 40) ** 0.5
        found = []
        for exponent in range(-2, 4):
            width = max(1, round(middle * 1.5**exponent))
            steps = int(cost / flops(width, 1))
            found.append([math.log(width), train(width, steps)])
        logs, of_runs = torch.tensor(found, dtype=torch.float64).T
        c, b, a = fit(logs[:, None] ** torch.arange(3), of_runs).tolist()  # a parabola
        costs.append(cost)
        widths.append(-b / (2 * a))
        losses.append(c - b**2 / (4 * a))
    logs = (torch.tensor(costs, dtype=torch.float64) / larger).log()
    widths, losses = torch.tensor([widths, losses], dtype=torch.float64)
    width = fit(logs[:, None] ** torch.arange(2), widths)[0].exp()  # a line
    best = math.inf
    for exponent in torch.arange(0.01, 1, 0.01):
        x = torch.stack([torch.ones_like(logs), (-exponent * logs).exp()], 1)
        law = fit(x, losses)
        error = (x @ law - losses).square().sum()
        if error < best:
            best, loss = error, law.sum()
    return round(width.item()), loss.item()
    # <<<


# Why: runs of one cost have losses that are a valley over the width: a narrow model cannot learn
# more, and a wide one has had too few steps. The bottoms of the valleys follow L = E + A C^-b. E is
# the entropy of the text: without it, the law falls through the floor, and the further it is
# extrapolated the deeper. Runs beside the bottom do not belong to the law. Kaplan et al. 2020
# (arXiv:2001.08361) did not let the learning rate fall to its end in each of their runs, among
# other things, and advised models that were much too large.
#
# Questions: 1. Each answer costs FLOPs in proportion to the model's size. So a narrower model that
# is trained for longer than is best for training is cheaper in all.
# 2. Then runs of some widths have losses that are too high, and the valley moves: the law has
# another width. Find the best rate for each width, or a rule by which it follows the width.
