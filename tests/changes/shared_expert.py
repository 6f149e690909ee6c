"""Mixtral with a feed-forward beside its experts, which all tokens use (Dai et al. 2024,
arXiv:2401.06066)."""

import model
from models import mixtral
from models.family import Family
from models.mixtral import MixtralConfig
from techniques.mixture import MixtureOfExperts


class SharedExpertConfig(MixtralConfig):
    def build(self):
        return WithSharedExpert(self)


class Mixture(MixtureOfExperts):
    def __init__(self, config: SharedExpertConfig):
        super().__init__(config)
        self.shared = model.FeedForward(config)

    def forward(self, x):
        return super().forward(x) + self.shared(x)


class Block(model.Block):
    feed_forward_type = Mixture


class WithSharedExpert(model.Llama):
    block_type = Block


def plan():
    from techniques.more_layers import OwnTokens

    own = OwnTokens()  # a mixture is given a rank's tokens
    shared = {f"layers.*.feed_forward.shared.{name}": own for name in ("w1", "w2", "w3")}
    return mixtral.plan() | shared


MODEL = Family(
    "shared_expert",
    SharedExpertConfig,
    {"tiny": SharedExpertConfig(96, 4, 4, 2, 144, tie_embeddings=True)},
    plan=plan,
)
