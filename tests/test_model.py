"""model.py against transformers, plain PyTorch and formulas, in float64."""

import math
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import hugging_face_model, like
from test_formats import our_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from config import ParallelConfig
from costs.shapes import flops_per_token, peak_flops
from files.formats import HF_NAMES, hf_name, to_hf_rows
from model import IGNORE, Llama, LlamaConfig, Vocabulary, sum_of_losses
from models.family import family_of, find_preset, presets
from perf.instruments import build_on_meta
from techniques import chunked_loss as chunked_loss_py
from techniques.chunked_loss import LOSS_CHUNK, chunked_loss
from techniques.kv_cache import KVCache

SMALL = LlamaConfig(64, 3, 4, 2, 96, vocab_size=97, max_seq_len=256)
DEEPSEEK = like(
    SMALL, "deepseek_v3", n_kv_heads=4, head_dim=24, n_experts=8, top_k=3, dense_dim=80, q_rank=32,
    kv_rank=20, rope_dim=8, value_dim=18, rope_mscale=0.7,
)  # fmt: skip
# Configurations that differ in what transformers treats differently.
CONFIGS = {
    "mha": replace(SMALL, n_kv_heads=4),
    "gqa": SMALL,
    "scaled rope": replace(SMALL, rope_scaling=32.0),
    "tied": replace(SMALL, tie_embeddings=True),
    "qwen2": like(SMALL, "qwen2"),
    "qwen3": like(SMALL, "qwen3", head_dim=24),
    "mixtral": like(SMALL, "mixtral", n_experts=5, balance="none"),
    "qwen3_moe": like(SMALL, "qwen3_moe", head_dim=24, n_experts=8, top_k=3, balance="none"),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, queries of x": replace(DEEPSEEK, q_rank=0, n_groups=1, top_groups=1, n_dense=0),
    "deepseek_v3, long": replace(DEEPSEEK, rope_scaling=40.0, rope_original=512, n_shared=2),
    "olmo2": like(SMALL, "olmo2", head_dim=24),
    "olmo3": like(SMALL, "olmo3", n_layers=4, window=9),
    "olmo3 yarn": like(SMALL, "olmo3", full_every=2, window=20, rope_scaling=8.0),
    "gemma3": like(SMALL, "gemma3", head_dim=24, full_every=2, window=9, tie_embeddings=True),
    "gemma3 linear": like(SMALL, "gemma3", n_layers=6, full_every=6, window=20, score_dim=20,
                          tie_embeddings=True, rope_scaling=8.0, rope_theta=1e6),
}  # fmt: skip
PUBLISHED_SIZES = {
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_419_200,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
}
# Weights are large enough for every part of the model to matter.
build = partial(our_model, dtype=torch.float64, factor=3, norms=(0.9, 1.2))


def tokens_of(config: LlamaConfig, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    size = b.norm().clamp(min=1e-300)
    return ((a - b).norm() / size).item()


def test_published_models_have_their_published_size():
    for name, size in PUBLISHED_SIZES.items():
        assert sum(p.numel() for p in build_on_meta(find_preset(name)).parameters()) == size
    for_lessons = presets().keys() - PUBLISHED_SIZES.keys()
    others = {name for name in for_lessons if not name.startswith("tiny")}
    assert others == {"small", "medium", "base"}


@pytest.mark.parametrize("name, length, scaling", [
    ("llama3-8b", 8192, 1), ("llama3.1-8b", 131_072, 8), ("llama3.1-70b", 131_072, 8),
    ("llama3.1-405b", 131_072, 8), ("llama3.2-1b", 131_072, 32), ("llama3.2-3b", 131_072, 32),
])  # fmt: skip
def test_published_llamas_have_their_published_context(name, length, scaling):
    """Which no number of parameters shows."""
    preset = find_preset(name)
    assert (preset.max_seq_len, preset.rope_scaling) == (length, scaling)


def test_initial_weights_depend_on_seed_and_name_alone():
    late = build_on_meta(SMALL).to_empty(device="cpu")
    early = Llama(SMALL)
    double = Llama(SMALL).double()
    for model in (late, early, double):
        model.init_weights(seed=5)
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter, early.get_parameter(name))
        assert torch.equal(parameter.double(), double.get_parameter(name))
    first, second, _ = (block.attention.wq.weight for block in late.layers.values())
    assert not torch.equal(first, second)
    double.init_weights(seed=6)
    assert not torch.equal(double.output.weight, late.output.weight.double())


def test_initial_weights_follow_what_a_module_says():
    model = like(SMALL, "mixtral", n_experts=4).build()
    model.init_weights()
    block = model.layers["1"]
    experts = block.feed_forward.experts
    small = 0.02 / math.sqrt(2 * SMALL.n_layers)
    expected = {experts.w1: 0.02, experts.w2: small, block.attention.wo: small}
    for layer, std in expected.items():
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
    qwen2 = like(SMALL, "qwen2").build()
    qwen2.init_weights()
    assert not qwen2.layers["1"].attention.wk.bias.any()
    model.more = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="more has no initial value: give its layer"):
        model.init_weights()


# ---------------------------------------------------------------------- transformers as reference


def to_hugging_face(config: LlamaConfig, weights: dict) -> dict:
    """Our weights under Hugging Face's names; q and k go from pairs to halves. In the memory of
    transformers 5, gate and up of all experts are one parameter."""
    named = {}
    for name, weight in weights.items():
        layer, is_of_experts, matrix = name.partition(".feed_forward.experts.")
        place = f"model.{layer}.mlp"
        if name.endswith("router.weight"):
            layer, _, _ = name.partition(".feed_forward.")
            named[f"model.{layer}.mlp.gate.weight"] = weight
        elif not is_of_experts:
            names = HF_NAMES | family_of(config).published.names
            named[hf_name(name, names)] = to_hf_rows(name, config, weight)
        elif matrix == "w2.weight":
            named[f"{place}.experts.down_proj"] = weight
        elif matrix == "w1.weight":
            up = weights[name.replace("w1", "w3")]
            named[f"{place}.experts.gate_up_proj"] = torch.cat([weight, up], 1)
    return named


def peer_in_float64(config: LlamaConfig, kind: str = "", **more) -> nn.Module:
    """transformers' model, in float64 throughout."""

    def norm(self, x):  # theirs computes in float32 whatever the model's dtype
        variance = x.pow(2).mean(-1, keepdim=True)
        if hasattr(self, "eps"):  # Gemma's
            return (1 + self.weight) * x * torch.rsqrt(variance + self.eps)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)

    def route(self, x):  # nor does theirs
        scores = F.linear(x.flatten(0, -2), self.weight)
        top = scores.softmax(-1).topk(self.top_k)
        weights = top.values / top.values.sum(-1, keepdim=True)
        return scores, weights, top.indices

    def in_float64(function):  # which asks for float32 by name
        other_torch = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
        return FunctionType(function.__code__, function.__globals__ | {"torch": other_torch})

    # sdpa, since "eager" computes its softmax in float32
    model = hugging_face_model(config, kind, attn_implementation="sdpa", **more).double()
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = partial(norm, module)
        if kind.endswith("TopKRouter"):
            module.forward = partial(route, module)
        if kind.endswith("TopkRouter"):
            module.forward = partial(in_float64(type(module).forward), module)
        if hasattr(module, "embed_scale"):  # a buffer in float32
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model


def load_weights(theirs: nn.Module, ours: Llama) -> None:
    """Load all weights of our model into transformers'."""
    weights = to_hugging_face(ours.config, dict(ours.named_parameters()))
    loaded = theirs.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}


def ours_and_theirs(config: LlamaConfig) -> tuple[Llama, nn.Module]:
    """Our model and transformers', with the same weights."""
    ours = build(config)
    theirs = peer_in_float64(config, eos_token_id=None, pad_token_id=None)
    load_weights(theirs, ours)
    return ours, theirs


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_every_gradient_equal_transformers(name):
    config = CONFIGS[name]
    ours, theirs = ours_and_theirs(config)
    tokens = tokens_of(config, 2, 48)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-10
    far = torch.arange(48).expand(2, -1) + 9000  # where the scaling of RoPE shows
    logits = ours(tokens, positions=far)
    assert relative(logits, theirs(tokens, position_ids=far).logits) < 1e-10

    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    loss = ours(inputs, targets=targets)
    logits = theirs(inputs).logits  # their own loss is computed in float32
    reference = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert relative(loss, reference) < 1e-10
    loss.backward()
    reference.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in ours.named_parameters()
        if not name.endswith("router.bias")  # the excess of tokens, which theirs does not compute
    }
    gradients = to_hugging_face(config, gradients)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert relative(gradient, expected[key]) < 1e-10, key


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_of_a_text_and_packed_documents_equal_transformers(name):
    """A piece may be longer or shorter than a window, and so may a document."""
    config = CONFIGS[name]
    ours, theirs = ours_and_theirs(config)
    tokens = tokens_of(config, 2, 48)
    expected = theirs(tokens).logits
    positions = torch.arange(48).expand(2, -1)
    cache = KVCache(48)
    for begin, end in ((0, 25), (25, 26), (26, 47), (47, 48)):
        piece = slice(begin, end)
        last = ours(tokens[:, piece], positions=positions[:, piece], cache=cache)
        assert relative(last[:, 0], expected[:, end - 1]) < 1e-10
    lengths = 5, 1, 42
    packed = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    alone = [theirs(document).logits for document in tokens.split(lengths, 1)]
    assert relative(ours(tokens, positions=packed), torch.cat(alone, 1)) < 1e-10


# ------------------------------------------------------------------------------------- the loss


def test_gradients_of_the_output_are_summed_in_float32():
    """Under autocast chunks are rounded to bfloat16, and their sum is not."""
    torch.manual_seed(0)
    hidden = torch.randn(4 * LOSS_CHUNK, 64)
    weight = torch.randn(101, 64) / 8
    targets = torch.randint(101, (len(hidden),))
    gradients = []
    for dtype in (torch.float64, torch.float32):
        leaf = weight.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = chunked_loss(hidden.to(dtype), leaf, targets, Vocabulary(101))
        loss.backward(retain_graph=True)
        gradients.append(leaf.grad)
    exact, summed = gradients
    assert summed.dtype == torch.float32
    assert relative(summed.double(), exact) < 0.0028  # rounded once more, 0.0031
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_compiled_loss_is_the_plain_one(dtype, monkeypatch):
    """As apply chooses it for a GPU: in chunks (the last is shorter); in float32 by autocast."""
    monkeypatch.setattr("techniques.chunked_loss.LOSS_CHUNK_COMPILED", 20)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    model = SimpleNamespace(loss=sum_of_losses)
    world = SimpleNamespace(parallel=ParallelConfig(compile=True), device=torch.device("cuda"))
    chunked_loss_py.apply(model, world)
    torch.manual_seed(0)
    targets = torch.randint(101, (50,))
    targets[::7] = IGNORE
    hidden = torch.randn(50, 64, dtype=dtype)
    weight = torch.randn(101, 64, dtype=dtype) / 8
    found = []
    for loss_of in (model.loss, sum_of_losses):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = loss_of(*inputs, targets, Vocabulary(101))
            with torch.no_grad():
                again = loss_of(*inputs, targets, Vocabulary(101))
        if loss_of is model.loss:
            assert relative(again, loss) < 0.01
        gradients = torch.autograd.grad(loss, inputs)
        found.append((loss.detach(), *gradients))
    tolerance = 1e-13 if dtype == torch.float64 else 0.005
    for ours, expected in zip(*found):
        assert relative(ours, expected) < tolerance
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


def test_a_compiled_run_evaluates_in_chunks_of_the_plain_loss(monkeypatch):
    sizes = []

    def plain(hidden, *_) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden.sum()

    monkeypatch.setattr(chunked_loss_py, "sum_of_losses", plain)
    hidden = torch.zeros(LOSS_CHUNK + 1, 4)
    with torch.no_grad():
        chunked_loss(hidden, hidden, hidden[:, 0], None, compiled=sum_of_losses)
    assert sizes == [LOSS_CHUNK, 1]


def test_loss_of_nothing_is_zero_with_zero_gradients():
    model = build(SMALL)
    tokens = tokens_of(SMALL, 2, 8)
    nothing = torch.full_like(tokens, IGNORE)
    loss = model(tokens, targets=nothing)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())


def test_loss_is_float32_in_bfloat16():
    model = build(SMALL)
    tokens = tokens_of(SMALL, 2, 9)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    expected = model(inputs, targets=targets)
    loss = model.bfloat16()(inputs, targets=targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert model.output.weight.grad.dtype == torch.bfloat16
    assert relative(loss.double(), expected) < 0.02


# ------------------------------------------------------------------------------------------ FLOPs


def test_flops_of_a_window_are_those_of_its_tokens():
    """Three of four layers attend to 16 tokens."""
    full = build(like(SMALL, "olmo3", n_layers=4, window=64))
    in_windows = build(like(SMALL, "olmo3", n_layers=4, window=16))
    left_out = 3 * 4 * SMALL.q_dim * 3 * (64 - 16)
    assert flops_per_token(full, 64) - flops_per_token(in_windows, 64) == left_out


@pytest.mark.parametrize("name", ["mha", "gqa", "tied"])
def test_flops_by_formula_equal_flops_counted(name):
    config = CONFIGS[name]
    model = build(config)
    tokens = tokens_of(config, 2, 33)
    # The plain attention kernel: the fused one computes its scores a second time in backward.
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
    assert counter.get_total_flops() == flops_per_token(model, 32) * 64


def test_peak_flops_of_known_and_unknown_devices():
    expected = {
        "H100 80GB HBM3": 989.4e12,
        "H100 PCIe": 756e12,
        "A100-SXM4-80GB": 312e12,
        "GeForce RTX 4090": 165.2e12,
        "GeForce RTX 4090 Laptop GPU": None,
        "RTX A1000": None,
    }
    for name, flops in expected.items():
        assert peak_flops(f"NVIDIA {name}") == flops
