"""techniques/optimizers.py: AdamW with moments in bfloat16."""

import pytest
import torch

from techniques import optimizers as adamw
from techniques.optimizers import BFloat16AdamW

BETAS, LR, EPS, DECAY = (0.9, 0.95), 0.01, 1e-8, 0.1
SHAPES = [(7, 5), (11,), (1,), (0, 3)]


def gradients(step: int) -> list[torch.Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def steps(make, n: int = 6, device: str = "cpu") -> list[torch.Tensor]:
    """Return the parameters after n steps of an optimizer that `make` returns for them."""
    parameters = [torch.nn.Parameter(values.to(device)) for values in gradients(0)]
    optimizer = make(parameters)
    for step in range(1, n + 1):
        for parameter, gradient in zip(parameters, gradients(step)):
            parameter.grad = gradient.to(device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


def with_bfloat16_moments(parameters) -> BFloat16AdamW:
    group = {"params": parameters, "weight_decay": DECAY}
    return BFloat16AdamW([group], lr=LR, betas=BETAS, eps=EPS)


def rounding_its_moments(parameters) -> torch.optim.AdamW:
    """Return torch's AdamW, whose moments are rounded to bfloat16 after each step."""
    optimizer = torch.optim.AdamW(parameters, LR, BETAS, EPS, DECAY)

    @torch.no_grad()
    def round_moments(*_) -> None:
        for state in optimizer.state.values():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                moment.copy_(moment.bfloat16())

    optimizer.register_step_post_hook(round_moments)
    return optimizer


@pytest.mark.parametrize("elements", [1, 10, 1 << 24])
def test_it_is_torchs_with_rounded_moments(monkeypatch, elements):
    monkeypatch.setattr(adamw, "ELEMENTS_AT_A_TIME", elements)
    ours, theirs = steps(with_bfloat16_moments), steps(rounding_its_moments)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_moments_that_rounding_would_stop_are_refused():
    with pytest.raises(ValueError, match=r"need betas of at most 0.99"):
        BFloat16AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1, betas=(0.9, 0.999))


@pytest.mark.slow
def test_it_compiles_once_for_all_shapes_and_steps(monkeypatch):
    """On a GPU it is compiled; here too."""
    monkeypatch.setattr("test_adamw.SHAPES", [*SHAPES, (64, 3), (100,), (50, 7), (1000, 7)])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = steps(with_bfloat16_moments)
    make = adamw.make_update
    monkeypatch.setattr(adamw, "make_update", lambda *given: make(*given[:-1], True))
    torch.testing.assert_close(steps(with_bfloat16_moments), plain, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # of 8 lengths
