"""techniques/bfloat16_moments.py and techniques/muon.py.

AdamW is compared with torch's, Muon's matrices with a singular value decomposition."""

import pytest
import torch
from conftest import alone
from plain import orthogonalized
from torch.utils.flop_counter import FlopCounterMode

from config import ParallelConfig
from model import Llama, LlamaConfig
from plumbing.messages import UserError
from plumbing.shards import matrices_of
from techniques import bfloat16_moments
from techniques.bfloat16_moments import BFloat16AdamW
from techniques.muon import flops_of_muon, orthogonalize
from techniques.optimizers import check_betas, make_optimizer, scale_gradients

BETAS = (0.9, 0.95)
LR = 0.01
EPS = 1e-8
DECAY = 0.1
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
    monkeypatch.setattr(bfloat16_moments, "ELEMENTS_AT_A_TIME", elements)
    ours = steps(with_bfloat16_moments)
    torch.testing.assert_close(ours, steps(rounding_its_moments), rtol=1e-12, atol=1e-12)


def test_moments_that_rounding_would_stop_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"need betas of at most 0.99"):
        BFloat16AdamW([parameter], lr=0.1, betas=(0.9, 0.999))
    in_bfloat16 = ParallelConfig(moments="bfloat16")
    with pytest.raises(UserError, match=r"needs betas of at most 0\.99"):
        check_betas((0.9, 0.999), in_bfloat16)
    check_betas((0.9, 0.99), in_bfloat16)
    check_betas((0.9, 0.999), ParallelConfig())


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_scale_of_gradients_holds_for_one_step(moments):
    """And gives what scaled gradients would."""
    found = []
    for scales in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5)
        parameters = [*model.parameters()]
        optimizer = make_optimizer(model, alone(optimizer="adamw", moments=moments))
        for step in (1, 2):
            gradients = [torch.randn_like(parameter) for parameter in parameters]
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient if scales or step == 2 else gradient / 4
            if scales and step == 1:
                scale_gradients(optimizer, gradients, torch.tensor(0.25))
            optimizer.step()
        found.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5), (1, 4), (4, 1)])
def test_singular_values_become_alike(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    found = orthogonalize(matrix)
    torch.testing.assert_close(found, orthogonalized(matrix), rtol=1e-12, atol=1e-12)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.25
    torch.testing.assert_close(orthogonalize(1e-20 * matrix), found, rtol=1e-12, atol=1e-12)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_operations_are_counted():
    model = Llama(LlamaConfig(16, 3, 4, 2, 40))
    with FlopCounterMode(display=False) as counter:
        for name, parameter in model.named_parameters():
            if name.startswith("layers.") and name in matrices_of(model):
                orthogonalize(parameter.detach())
    total = counter.get_total_flops()
    assert flops_of_muon(model, ParallelConfig()) == total
    # Of 21 matrices, 9 are in 3 batches of feed-forward's alone; no rank has more than rank 0.
    of_three = flops_of_muon(model, ParallelConfig("fsdp", shard=3))
    assert total / 3 <= of_three < total / 3 * 1.1
    assert flops_of_muon(model, ParallelConfig("hsdp", replicate=7, shard=3)) < total / 9
