"""techniques/nf4.py against bitsandbytes, which is the reference implementation of the format."""

import pytest
import torch
from exact import plain_model
from workers.train_cases import build

import techniques.nf4 as nf4
from lora import LoRA, LoRALinear, quantize_base
from perf.instruments import Live
from techniques.nf4 import BLOCK, dequantized, quantized, rounded

CONFIG = dict(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=101)
KINDS = "normal", "heavy-tailed", "with zeros", "with outliers"


def matrix_of(*shape: int, kind: str = "normal") -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "heavy-tailed":
        return torch.distributions.StudentT(3.0).sample(shape)
    matrix = torch.randn(*shape) / 50
    if kind == "with zeros":
        matrix[3], matrix[5, :BLOCK] = 0, 0
    if kind == "with outliers":
        matrix[::7, ::50] *= 40
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_values_are_those_of_bitsandbytes(kind, dtype):
    """Given the same scales. Its quantizer scales a block by its largest number, so it is given
    blocks that have one more number: what we scale by. Errors are no larger than with its own
    scales, quantized twice."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    matrix = matrix_of(256, 2048, kind=kind).to(dtype)
    weight, row_scale = quantized(matrix)
    scales = weight[..., 0] * row_scale.view(torch.float32)  # of each block, [out, in / 64]
    how = dict(shape=matrix.shape, blocksize=BLOCK, quant_type="nf4", dtype=torch.float32)
    nf4_code = bnb.get_4bit_type("nf4", "cpu")
    state = bnb.QuantState(absmax=scales.flatten(), code=nf4_code, **how)
    codes = weight[..., 1:].reshape(-1, 1).contiguous()
    values = dequantized(weight, row_scale, torch.float32)
    assert torch.equal(bnb.dequantize_4bit(codes, state), values)

    clipped = (matrix.float().unflatten(1, (-1, BLOCK)) / scales[..., None]).clamp(-1, 1)
    blocks = clipped.flatten(0, 1).clone()
    blocks[:, 0] = 1.0  # the largest number of each block: the scale is then 1
    theirs, absmax = bnb.quantize_4bit(blocks, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(absmax.absmax.float(), torch.ones(len(blocks)))
    theirs = torch.stack([theirs >> 4, theirs & 15], -1).view(-1, BLOCK)
    ours = torch.stack([codes >> 4, codes & 15], -1).view(-1, BLOCK)
    assert torch.equal(ours[:, 1:], theirs[:, 1:])

    options = dict(blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(matrix.float(), **options))
    assert (values - matrix).norm() <= (theirs - matrix).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_in_another_dtype_are_rounded_once(dtype):
    weight, row_scale = quantized(matrix_of(2100, 512))  # more than are converted at once
    exact = dequantized(weight, row_scale, torch.float32)
    assert torch.equal(dequantized(weight, row_scale, dtype), exact.to(dtype))


def test_all_matrices_of_blocks_are_in_4_bits_and_nothing_else():
    model = build(CONFIG | dict(qkv_bias=True), dict(rank=2, targets=("wq",), base_bits=4))
    in_4_bits = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    named = build(CONFIG).named_parameters()
    matrices = {name for name, p in named if name.startswith("layers.") and p.ndim == 2}
    assert in_4_bits == matrices | {name.replace("weight", "row_scale") for name in matrices}
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {"wq"}


@pytest.mark.parametrize("dora, compiled", [(False, False), (True, False), (True, True)])
def test_numbers_are_never_saved(dora, compiled):
    """What forward saves for backward has no matrix of a block's layer, with as many rows."""
    model = plain_model(CONFIG | dict(n_layers=1), dict(rank=2, base_bits=4, dora=dora))
    shapes = {(m.out_features, m.in_features) for m in model.modules() if hasattr(m, "lora_A")}
    block = model.layers["0"]
    if compiled:  # traced and divided as by inductor, without kernels
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    tokens, saved = torch.arange(14).view(2, 7), []  # 14 is no width
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        loss = model(tokens, targets=tokens)
    loss.backward()
    found = {tuple(t.shape) for t in saved} | {tuple(t.T.shape) for t in saved if t.ndim == 2}
    assert len(saved) > 20 and any(t.dtype == torch.uint8 for t in saved)
    assert not found & shapes


def test_loading_takes_the_memory_of_the_result_and_one_matrix(monkeypatch):
    monkeypatch.setattr(nf4, "WEIGHTS_AT_ONCE", 1024)
    config = CONFIG | dict(n_layers=6)
    model = build(config, dict(rank=2, base_bits=4)).to_empty(device="cpu")
    shapes = {name: p.shape for name, p in build(config).named_parameters()}
    with Live(list(model.parameters())) as live:
        before = live.now
        quantize_base(model, lambda name: torch.zeros(shapes[name]))
    largest, packed = 4 * 128 * 256, 33 * 2 * 256 + 4 * 256  # bytes of w1 or w2
    assert largest < live.peak - before < 1.1 * (largest + packed) + 64 * 1024


def test_under_autocast_products_are_in_its_dtype():
    """Also of an input in float32, as a norm may return; with the numbers that codes stand for."""
    layer = LoRALinear(torch.nn.Linear(128, 96, bias=False), LoRA(rank=4), bits=4)
    matrix = matrix_of(96, 128)
    with torch.no_grad():
        for parameter, value in zip((layer.weight, layer.row_scale), quantized(matrix)):
            parameter.copy_(value)
    torch.nn.init.normal_(layer.lora_A), torch.nn.init.normal_(layer.lora_B)
    x = matrix_of(5, 128).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    exact = x.detach() @ (rounded(matrix) + 4 * layer.lora_B.detach() @ layer.lora_A.detach()).T
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert (y.float() - exact).norm() < 0.02 * exact.norm()
