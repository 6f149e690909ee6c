"""techniques/optimizers.py: AdamW with moments in bfloat16."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from config import ParallelConfig
from model import Llama, LlamaConfig
from techniques import optimizers as adamw
from techniques.optimizers import BFloat16AdamW, make_optimizer, scale_gradients

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


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the update be compiled, as there."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    adamw.make_update.cache_clear()
    monkeypatch.setattr(adamw, "has_triton", lambda device: True)
    yield
    adamw.make_update.cache_clear()


@pytest.mark.slow
def test_it_compiles_once_for_a_block_and_all_steps(monkeypatch, on_a_gpu):
    """A kernel for each parameter; the one of a single element is not compiled."""
    monkeypatch.setattr("test_adamw.SHAPES", [*SHAPES, (64, 3), (1000, 7)])
    compiled = steps(with_bfloat16_moments)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._inductor.metrics.generated_kernel_count <= 4
    monkeypatch.setattr(adamw, "has_triton", lambda device: False)
    torch.testing.assert_close(compiled, steps(with_bfloat16_moments), rtol=1e-12, atol=1e-12)


def test_a_block_is_one_call_that_reads_20_bytes_a_weight(monkeypatch, on_a_gpu):
    """Of 32 layers, 291 parameters as in 8B: what its graphs read and write, if each once."""
    moved = []

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        writes = (
            node for node in module.graph.nodes if node.target is torch.ops.aten.copy_.default
        )
        written = [node.args[0] for node in writes]
        read = [node for node in module.graph.nodes if node.op == "placeholder"]
        nbytes = sum(node.meta["val"].nbytes for node in (*read, *written))
        return lambda *given: moved.append(nbytes) or module(*given)

    compiler = lambda *given: make_boxed_func(count(*given))  # noqa: E731
    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = Llama(LlamaConfig(16, 32, 2, 1, 32, vocab_size=64))
    optimizer = make_optimizer(model, ParallelConfig(optimizer="adamw", moments="bfloat16"))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    scale_gradients(optimizer, [p.grad for p in parameters], torch.tensor(0.5))
    optimizer.step()
    elements = sum(parameter.numel() for parameter in parameters)
    assert len(parameters) == 291 and len(moved) == 33
    assert sum(moved) == pytest.approx(20 * elements, rel=0.01)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_scale_of_gradients_holds_for_one_step(moments):
    """And gives what scaled gradients would."""
    found = []
    for scale in (0.25, None):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5)
        optimizer = make_optimizer(model, ParallelConfig(optimizer="adamw", moments=moments))
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            gradients = [parameter.grad for parameter in model.parameters()]
            if step == 1 and scale:
                scale_gradients(optimizer, gradients, torch.tensor(scale))
            elif step == 1:
                torch._foreach_mul_(gradients, 0.25)
            optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
