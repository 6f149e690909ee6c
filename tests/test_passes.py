"""Passes: the numbers and gradients of model.py's own functions, and never in place of others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from model import FeedForward, Llama, LlamaConfig, RMSNorm, Vocabulary, rope_angles, rotate, swiglu
from techniques import passes

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error <= TOLERANCE[dtype], error


def compare(ours, theirs, inputs: list[torch.Tensor], *constants) -> None:
    """Compare the outputs of two functions, and the gradients of their inputs."""
    results = []
    for function in (ours, theirs):
        given = [x.clone().requires_grad_() for x in inputs]
        output = function(*given, *constants)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output))
        results.append((output, *(x.grad for x in given)))
    for pair in zip(*results):
        close(*pair, inputs[0].dtype)


def in_few_passes(norm: RMSNorm) -> RMSNorm:
    passes.put_in(norm, ["RMSNorm"])
    return norm


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 1, 7), (6,)])
@pytest.mark.parametrize("change", [lambda norm: norm, in_few_passes])
def test_the_norm_is_torchs(change, shape, dtype, frozen):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    norms = change(RMSNorm(shape[-1], eps=1e-2)), nn.RMSNorm(shape[-1], eps=1e-2)

    def function(norm):
        return lambda x, weight: functional_call(norm, {"weight": weight}, x)

    given = ([x], weight) if frozen else ([x, weight],)
    compare(*map(function, norms), *given)


def test_a_norm_of_no_rows_has_none():
    assert in_few_passes(RMSNorm(4, eps=1e-2))(torch.randn(0, 4)).shape == (0, 4)


def test_second_derivatives_of_the_norm_are_refused():
    x, norm = torch.randn(3, 8, requires_grad=True), in_few_passes(RMSNorm(8, eps=1e-5))
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotations_and_swiglu_are_those_of_the_formulas(dtype):
    torch.manual_seed(0)
    angles = rope_angles(LlamaConfig(64, 1, 4, 2), torch.arange(7)[None])
    x = torch.randn(3, 4, 7, 16, dtype=dtype).transpose(1, 2)  # as attention's
    compare(passes.rotate_in_one_pass, rotate, [x], *angles)
    compare(passes.SwiGLU.apply, swiglu, [*torch.randn(2, 3, 5, 24, dtype=dtype)])


def test_a_norm_saves_its_input_and_one_number_a_row():
    saved = []
    norm = in_few_passes(RMSNorm(8, eps=1e-5))
    pack, unpack = lambda t: saved.append(t.numel()), lambda t: t
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        norm(torch.randn(3, 5, 8, requires_grad=True))
    assert sorted(saved) == [8, 15, 120]


EVERYTHING = {"RMSNorm", "RoPE", "SwiGLU", "cross entropy"}


def replaced() -> set[str]:
    """What passes.py puts into a model."""
    passes.replaceable.cache_clear()
    passes.use_fewer_passes(model := Llama(LlamaConfig(16, 1, 2, 1, 12, 11)))
    passes.replaceable.cache_clear()
    block = model.layers["0"]
    found = {
        "RMSNorm": block.ffn_norm.normalize is passes.norm_in_few_passes,
        "RoPE": block.attention.rotate is passes.rotate_in_one_pass,
        "SwiGLU": block.feed_forward.swiglu is passes.swiglu_that_saves_less,
        "cross entropy": "cross_entropy" in vars(model.vocabulary),
    }
    return {name for name, is_replaced in found.items() if is_replaced}


def test_what_was_changed_is_not_replaced(monkeypatch, capsys):
    assert replaced() == EVERYTHING and not capsys.readouterr().err
    with monkeypatch.context() as changed:
        changed.setattr("model.rms_norm", lambda x, *_: F.layer_norm(x, x.shape[-1:]))
        changed.setattr("model.rotate", lambda x, cos, sin: rotate(x, cos, -sin))
        changed.setattr("model.swiglu", lambda gate, up: F.gelu(gate) * up)
        changed.setattr(Vocabulary, "cross_entropy", lambda v, logits, _: v.logsumexp(logits))
        assert replaced() == set()
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 4 and "model.py's own RoPE is used" in notes[1]
    with monkeypatch.context() as changed:
        changed.setattr("model.swiglu", lambda gate, up: F.silu(gate.clamp(max=20)) * up)
        assert replaced() == EVERYTHING - {"SwiGLU"}
    capsys.readouterr()

    def of_relu(self, x):  # leaves swiglu out
        return self.w2(F.relu(self.w1(x)).square() * self.w3(x))

    monkeypatch.setattr(FeedForward, "forward", of_relu)
    assert replaced() == EVERYTHING and not capsys.readouterr().err


def test_a_layer_that_has_its_own_function_keeps_it(monkeypatch):
    class WithoutPositions(passes.model_py.Attention):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.rotate = (lambda x, *_: x) if layer == 3 else self.rotate

    monkeypatch.setattr("model.Attention", WithoutPositions)
    passes.use_fewer_passes(model := Llama(LlamaConfig(16, 4, 2, 1, 12, 11)))
    ours = [block.attention.rotate is passes.rotate_in_one_pass for block in model.layers.values()]
    assert ours == [True, True, True, False]
