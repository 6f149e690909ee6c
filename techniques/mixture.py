"""The feed-forward of a block with experts: each token goes to the K that its router chooses.

No token is dropped, and none is padded. Rows are sorted by expert, computed, put back and summed:

    rows             t0 t0 t1 t1 t2 t2        K = 2 copies of each of N = 3 tokens
    their experts     0  2  2  3  0  3        of X = 4
    sorted           t0 t2 | t0 t1 | t1 t2    of experts 0, 2 and 3; expert 1 has none
"""

from torch import nn

from techniques.experts import Experts, Reordered, Router


class MixtureOfExperts(nn.Module):
    writes_to_stream = ()  # itself; its experts do
    by_token = True  # so that --tp need not gather tokens

    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x):
        tokens = x.flatten(0, 1)  # [N, D]
        experts, weights, counts = self.router(tokens)  # [N, K], [N, K], [X]
        order = experts.flatten().argsort(stable=True)  # [N K]: sorted row i was row order[i]
        back = order.argsort()  # row i becomes sorted row back[i]
        rows = Reordered.apply(tokens, order, back, experts.shape[1])  # [N K, D]
        out = Reordered.apply(self.experts(rows, counts), back, order, 1)  # by token
        out = out.unflatten(0, experts.shape)  # [N, K, D]
        return (weights[..., None] * out).sum(1).type_as(x).view_as(x)
