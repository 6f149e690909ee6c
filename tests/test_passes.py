"""plumbing/passes.py: the same numbers and gradients as torch's norm, and as RoPE with cosines."""

import pytest
import torch
from torch import nn

from model import LlamaConfig, rope_angles, rotate
from plumbing import passes
from plumbing.passes import RMSNorm

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 1, 7), (0, 4), (6,)])
def test_the_norm_is_torchs(shape, dtype, frozen):
    torch.manual_seed(0)
    ours, theirs = (cls(shape[-1], eps=1e-2).to(dtype) for cls in (RMSNorm, nn.RMSNorm))
    weight = torch.randn(shape[-1])
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        norm.weight.requires_grad_(not frozen)
    x, grad = torch.randn(2, *shape, dtype=dtype).unbind()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(x) for norm, x in zip((ours, theirs), inputs)]
    if not x.numel():
        return
    close(*outputs, dtype)
    for output in outputs:
        output.backward(grad)
    close(inputs[0].grad, inputs[1].grad, dtype)
    if not frozen:
        close(ours.weight.grad, theirs.weight.grad, dtype)


def test_second_derivatives_of_the_norm_are_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(RMSNorm(8, eps=1e-5)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotations_are_those_of_the_formula(dtype, monkeypatch):
    torch.manual_seed(0)
    cos, sin = rope_angles(LlamaConfig(64, 1, 4, 2), torch.arange(7)[None])
    x, grad = torch.randn(2, 3, 4, 7, 16, dtype=dtype).transpose(2, 3).unbind()  # as attention's
    results = []
    for torch_fuses in (passes.torch_fuses, lambda x: True):
        monkeypatch.setattr("model.torch_fuses", torch_fuses)
        given = x.clone().requires_grad_()
        rotated = rotate(given, cos, sin)
        rotated.backward(grad)
        results.append((rotated, given.grad))
    for ours, theirs in zip(*results):
        close(ours, theirs, dtype)


def test_a_norm_saves_its_input_and_one_number_a_row():
    saved = []
    x, norm = torch.randn(3, 5, 8, requires_grad=True), RMSNorm(8, eps=1e-5)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        norm(x)
    assert sorted(saved) == [8, 15, 120]
