"""A base in 4 bits: in runs with DoRA, saved, resumed and merged; and its format.

The format is compared with bitsandbytes, which is the reference implementation."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import needs_2_13, step_of, succeed
from plain import plain_model
from test_chat import BYTES
from test_finetune import factors, flags, same_run
from test_formats import our_model, saved
from workers.train_cases import build

import bench
from config import ParallelConfig
from files.adapters import load_adapter
from files.loading import load_pretrained
from generate import load_model
from lora import LoRA, LoRALinear, quantize_base
from model import Llama, LlamaConfig
from models.family import TARGETS
from perf.instruments import Live, build_on_meta
from plumbing.messages import UserError
from plumbing.parser import parse
from plumbing.processes import Process
from techniques import nf4
from techniques.nf4 import BLOCK, dequantized, quantized, refuses, rounded

# Blocks of 64 weights: also where two or four ranks share the rows of wo and w2.
CONFIG = LlamaConfig(128, 2, 4, 2, 256, vocab_size=267, max_seq_len=256)
FLAGS = dict(steps=4, base_bits=4, dora=True, save_every=2, keep=0, rank=4, lr=0.01)


def rounded_to_4_bits(model: Llama) -> Llama:
    """Round the matrices of a model in place, as a base in 4 bits has them."""
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            layer.weight.data = rounded(layer.weight.detach())
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A checkpoint in bfloat16, whose matrices 4 bits can hold."""
    model = our_model(CONFIG, torch.bfloat16, seed=3, factor=4, norms=(1, 1))
    directory = tmp_path_factory.mktemp("base")
    return saved(directory / "base", model, BYTES)


@pytest.fixture(scope="module")
def one_run(base, sums, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    command = flags(base, sums, out, **FLAGS, merge=True)
    return out, succeed("finetune_lora.py", *command).out


def test_an_adapter_goes_on_beside_the_base_that_it_saw(base, one_run):
    """Loaded for generation, and merged: beside the rounded base, not the original."""
    out, _ = one_run
    checkpoint = out / "step-00000004"
    assert any(name.endswith("lora_magnitude_vector") for name in factors(checkpoint))
    tokens = torch.arange(20)[None]
    model = load_pretrained(base, torch.float64)
    load_adapter(model, checkpoint)
    expected = model(tokens)
    merged = load_pretrained(out / "merged", torch.float64)
    error = (merged(tokens) - expected).norm()
    assert error < 0.03 * expected.norm()  # bfloat16
    shutil.copytree(checkpoint, out / "plain", dirs_exist_ok=True)
    (out / "plain" / "run.json").unlink()  # PEFT's files alone do not say what the base was
    beside_original = load_pretrained(base, torch.float64)
    load_adapter(beside_original, out / "plain")
    assert (beside_original(tokens) - expected).norm() > 5 * error


@pytest.mark.parametrize("with_adapter", [False, True])
@torch.no_grad()
def test_text_is_generated_beside_a_base_in_4_bits(base, one_run, with_adapter):
    """With the logits of full matrices that have been rounded, and its weights in bytes."""
    out, printed = one_run
    assert f"--adapter {out} --base-bits 4 --chat" in printed
    adapter = out / "step-00000004" if with_adapter else None
    cpu = torch.device("cpu")
    model = load_model(base, CONFIG, adapter, 4, cpu)
    matrices = [m for name, m in model.named_modules() if name.endswith(TARGETS)]
    assert {matrix.weight.dtype for matrix in matrices} == {torch.uint8}
    full = load_model(base, CONFIG, adapter, 16, cpu)
    if not with_adapter:
        rounded_to_4_bits(full)
    tokens = torch.arange(20)[None]
    expected = full(tokens)
    assert (model(tokens) - expected).norm() < 1e-5 * expected.norm()


def test_what_a_run_computes_with_is_the_rounded_base(base, sums, one_run, tmp_path):
    """The same run beside a base in 16 bits that was rounded before."""
    expected, _ = one_run
    model = load_pretrained(base, torch.float64)
    rounded_base = saved(tmp_path / "rounded", rounded_to_4_bits(model), BYTES)
    out = tmp_path / "run"
    given = FLAGS | dict(base_bits=16)
    succeed("finetune_lora.py", *flags(rounded_base, sums, out, **given))
    same_run(out, expected, step=4)


@needs_2_13
def test_a_run_goes_on_as_on_one_process(base, sums, one_run, tmp_path):
    """Resumed on a mesh from a checkpoint of one process."""
    expected, _ = one_run
    out = tmp_path / "run"
    shutil.copytree(expected, out)
    shutil.rmtree(out / "step-00000004")
    shutil.rmtree(out / "merged")
    mesh = dict(dp="fsdp", microbatch=1, checkpointing="full")
    arguments = flags(base, sums, out, **FLAGS, **mesh)
    result = succeed("finetune_lora.py", *arguments, "--resume", nproc=2, timeout=300)
    assert f"resumed from {out / 'step-00000002'}" in result.out
    same_run(out, expected, step=4)


def test_a_torch_that_shards_no_bytes_is_refused(monkeypatch):
    old = torch.torch_version.TorchVersion("2.11.0")
    monkeypatch.setattr(torch, "__version__", old)
    for ranks in (1, 2):
        parallel = ParallelConfig(dp="fsdp", shard=ranks)
        work = step_of(build_on_meta(CONFIG), parallel, 2, 1, 8)
        assert "torch 2.11.0 cannot shard a base in 4 bits" in refuses(work)


def test_heads_that_no_two_ranks_can_share_in_whole_blocks_are_refused():
    config = LlamaConfig(128, 1, 6, 2, 256, head_dim=32)
    assert "a row of wo has 192:" in nf4.why_not_in_4_bits(config, tp=2)


@needs_2_13
def test_a_comparison_refuses_what_training_refuses():
    asked = parse(bench.Comparison, "--lora --base-bits 4 --model olmo2-7b --batch 8".split())
    process = Process(0, 8, 0, 8, torch.device("cpu"))
    with pytest.raises(UserError, match="4 needs blocks of 64 weights for each of 8 rank"):
        bench.work_of(asked, "--tp 8", process)


# ------------------------------------------------------------------------------------ the format

SMALL = dict(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=101)
KINDS = "normal", "heavy-tailed", "with zeros", "with outliers"


def matrix_of(*shape: int, kind: str = "normal") -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "heavy-tailed":
        return torch.distributions.StudentT(3.0).sample(shape)
    matrix = torch.randn(*shape) / 50
    if kind == "with zeros":
        matrix[3] = 0
        matrix[5, :BLOCK] = 0
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
    how = dict(blocksize=BLOCK, quant_type="nf4")
    state = bnb.QuantState(
        absmax=scales.flatten(),
        code=bnb.get_4bit_type("nf4", "cpu"),
        shape=matrix.shape,
        dtype=torch.float32,
        **how,
    )
    codes = weight[..., 1:].reshape(-1, 1).contiguous()
    values = dequantized(weight, row_scale, torch.float32)
    assert torch.equal(bnb.dequantize_4bit(codes, state), values)

    blocks = matrix.float().unflatten(1, (-1, BLOCK))
    blocks = (blocks / scales[..., None]).clamp(-1, 1)
    blocks = blocks.flatten(0, 1)
    blocks[:, 0] = 1.0  # the largest number of each block: the scale is then 1
    theirs, state = bnb.quantize_4bit(blocks, **how)
    assert torch.equal(state.absmax.float(), torch.ones(len(blocks)))
    theirs = torch.stack([theirs >> 4, theirs & 15], -1).view(-1, BLOCK)
    ours = torch.stack([codes >> 4, codes & 15], -1).view(-1, BLOCK)
    assert torch.equal(ours[:, 1:], theirs[:, 1:])

    twice = bnb.quantize_4bit(matrix.float(), compress_statistics=True, **how)
    error = (values - matrix).norm()
    assert error <= (bnb.dequantize_4bit(*twice) - matrix).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_in_another_dtype_are_rounded_once(dtype):
    weight, row_scale = quantized(matrix_of(2100, 512))  # more than are converted at once
    exact = dequantized(weight, row_scale, torch.float32)
    assert torch.equal(dequantized(weight, row_scale, dtype), exact.to(dtype))


def test_all_matrices_of_blocks_are_in_4_bits_and_nothing_else():
    adapter = dict(rank=2, targets=("wq",), base_bits=4)
    model = build(SMALL | dict(family="qwen2"), adapter)
    in_4_bits = set()
    trainable_layers = set()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            in_4_bits.add(name)
        if parameter.requires_grad:
            trainable_layers.add(name.split(".")[-2])
    expected = set()
    for name, parameter in build(SMALL).named_parameters():
        if name.startswith("layers.") and parameter.ndim == 2:
            expected |= {name, name.replace("weight", "row_scale")}
    assert in_4_bits == expected
    assert trainable_layers == {"wq"}


@pytest.mark.parametrize("dora, compiled", [(False, False), (True, False), (True, True)])
def test_numbers_are_never_saved(dora, compiled):
    """What forward saves for backward has no matrix of a block's layer, with as many rows."""
    adapter = dict(rank=2, base_bits=4, dora=dora)
    model = plain_model(SMALL | dict(n_layers=1), adapter)
    shapes = {(m.out_features, m.in_features) for m in model.modules() if hasattr(m, "lora_A")}
    block = model.layers["0"]
    if compiled:  # traced and divided as by inductor, without kernels
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    tokens = torch.arange(14).view(2, 7)  # 14 is no width
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, targets=tokens)
    loss.backward()
    assert len(saved) > 20
    assert any(tensor.dtype == torch.uint8 for tensor in saved)
    for tensor in saved:
        shape = tuple(tensor.shape)
        assert shape not in shapes
        assert shape[::-1] not in shapes


def test_loading_takes_the_memory_of_the_result_and_one_matrix(monkeypatch):
    monkeypatch.setattr(nf4, "WEIGHTS_AT_ONCE", 1024)
    config = SMALL | dict(n_layers=6)
    model = build(config, dict(rank=2, base_bits=4)).to_empty(device="cpu")
    shapes = {name: p.shape for name, p in build(config).named_parameters()}
    with Live(list(model.parameters())) as live:
        before = live.now
        quantize_base(model, lambda name: torch.zeros(shapes[name]))
    in_float32 = 4 * 128 * 256  # bytes of w1 or w2
    in_4_bits = 33 * 2 * 256 + 4 * 256
    more = live.peak - before
    assert more > in_float32
    assert more < 1.1 * (in_float32 + in_4_bits) + 64 * 1024


def test_under_autocast_products_are_in_its_dtype():
    """Also of an input in float32, as a norm may return; with the numbers that codes stand for."""
    linear = torch.nn.Linear(128, 96, bias=False)
    layer = LoRALinear(linear, LoRA(rank=4), bits=4)
    matrix = matrix_of(96, 128)
    weight, row_scale = quantized(matrix)
    layer.weight.data.copy_(weight)
    layer.row_scale.data.copy_(row_scale)
    torch.nn.init.normal_(layer.lora_A)
    torch.nn.init.normal_(layer.lora_B)
    x = matrix_of(5, 128).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    change = 4 * layer.lora_B.detach() @ layer.lora_A.detach()
    exact = x.detach() @ (rounded(matrix) + change).T
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert (y.float() - exact).norm() < 0.02 * exact.norm()
