"""lora.py, files/adapters.py against adapters added by hand, and against PEFT."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import change_json, like, same_with_gradients
from torch import nn

from files.adapters import (
    PEFT_FILES,
    gather_adapters,
    load_adapter,
    merged_weights,
    open_adapter,
    save_adapter,
)
from files.export import save_hf
from files.safetensors import StoredTensor, open_safetensors, save_safetensors
from finetune_lora import targets_in
from lora import (
    LoRA,
    LoRALinear,
    adapters,
    add_adapters,
    init_adapters,
    merged_weight,
)
from model import Llama, LlamaConfig
from plumbing.messages import UserError
from techniques.recompute import recompute_and_compile

CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=64, max_seq_len=16_384, rope_scaling=8.0)
QWEN2 = like(CONFIG, "qwen2", rope_scaling=1.0)
DEEPSEEK = like(
    QWEN2, "deepseek_v3", n_kv_heads=4, head_dim=12, n_experts=8, top_k=3, dense_dim=40, q_rank=20,
    kv_rank=16, rope_dim=4, value_dim=10,
)  # fmt: skip
OLMO2 = like(CONFIG, "olmo2")
OLMO3 = like(CONFIG, "olmo3", window=4, full_every=2)
GEMMA3 = like(CONFIG, "gemma3", window=4, full_every=2, tie_embeddings=True, score_dim=12)
SEEDED = torch.Generator().manual_seed(3)
TOKENS = torch.randint(CONFIG.vocab_size, (2, 11), generator=SEEDED)


def adapted(config: LlamaConfig, lora: LoRA, dtype=torch.float64) -> Llama:
    """Return a model with adapters whose factors B, and biases, are not zero."""
    model = config.build().to(dtype)
    model.init_weights(seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    add_adapters(model, lora)
    init_adapters(model, seed=2)
    torch.manual_seed(0)
    for name, factor in adapters(model).items():
        if name.endswith("lora_B"):
            nn.init.normal_(factor, std=0.1)
        if name.endswith("lora_magnitude"):
            nn.init.uniform_(factor, 0.2, 0.4)
    return model


# ------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("dora", [False, True])
def test_training_starts_from_the_model_as_it_is(dora):
    model = Llama(CONFIG)
    model.init_weights()
    before = model(TOKENS)
    add_adapters(model, LoRA(dora=dora))
    init_adapters(model)
    assert torch.equal(model(TOKENS), before)
    for name, factor in adapters(model).items():
        if name.endswith("lora_A"):  # uniform within 1 / sqrt(in)
            bound = factor.shape[1] ** -0.5
            largest = factor.abs().max()
            std = factor.std().item()
            assert 0.9 * bound < largest <= bound
            assert std == pytest.approx(bound / 3**0.5, rel=0.15)


def merged(layer: LoRALinear) -> torch.Tensor:
    factors = layer.lora_A, layer.lora_B, layer.lora_magnitude
    return merged_weight(layer.weight, layer.lora.scale, *factors)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@torch.no_grad()
def test_merge(dtype, dora):
    model = adapted(QWEN2, LoRA(rank=3, alpha=7, dora=dora), dtype)
    before = model(TOKENS)
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(layers) == 14
    master_weights = {factor.dtype for factor in adapters(model).values()}
    assert master_weights == {torch.promote_types(dtype, torch.float32)}
    for layer in layers:
        base = layer.weight.double().clone()
        layer.weight.copy_(merged(layer))
        exact = base + 7 / 3 * layer.lora_B.double() @ layer.lora_A.double()
        if dora:
            norms = exact.norm(dim=1)
            exact *= (layer.lora_magnitude / norms)[:, None]
        unit = torch.finfo(dtype).eps
        assert torch.allclose(layer.weight.double(), exact, rtol=2 * unit)
        layer.lora_B.zero_()  # now the weight has it
    error = (model(TOKENS) - before).norm() / before.norm()
    tolerances = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}
    assert error < tolerances[dtype]


def test_dropout_acts_on_the_input_of_adapters():
    """It masks x and scales it up, with autograd's gradients; in evaluation it does nothing."""
    linear = nn.Linear(24, 16, bias=False).double()
    layer = LoRALinear(linear, LoRA(rank=4, dropout=0.4))
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    layer.weight.requires_grad_(False)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)

    def plain(dropped: torch.Tensor) -> torch.Tensor:
        change = 4 * (dropped @ layer.lora_A.T) @ layer.lora_B.T
        return x @ layer.weight.T + change

    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    dropped = F.dropout(x.flatten(0, 1), 0.4).view_as(x)
    assert 0.2 < (dropped == 0).double().mean() < 0.6
    same_with_gradients(y, plain(dropped), (x, layer.lora_A, layer.lora_B))
    torch.testing.assert_close(layer.eval()(x), plain(x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_norms_of_rows_and_magnitudes_in_bfloat16():
    """Norms are exact under autocast. FSDP rounds magnitudes: a factor that is 1 stays 1. A row of
    zeros yields zeros, not NaN."""
    linear = nn.Linear(64, 32, bias=False)
    layer = LoRALinear(linear, LoRA(rank=4, dora=True))
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    exact = layer.weight.double() + 4 * layer.lora_B.double() @ layer.lora_A.double()
    with torch.autocast("cpu", torch.bfloat16):
        norms = layer.row_norms()
    assert torch.allclose(norms.double(), exact.norm(dim=1), rtol=1e-6)
    layer.weight[3] = 0
    nn.init.zeros_(layer.lora_B)
    layer.lora_magnitude.copy_(layer.row_norms())
    x = torch.randn(5, 64)
    parameters = layer.ordered_parameters()[:4]
    norms = layer.lora_magnitude.bfloat16(), layer.row_norms()
    y = layer.product(x, *parameters, *norms, 0.0, None, layer.lora.scale)
    assert torch.equal(y, x @ layer.weight.T)
    assert not y[:, 3].any()
    assert merged(layer).isfinite().all()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_drops_the_same_again(mode):
    gradients = []
    for checkpointing in ("none", mode):
        model = adapted(CONFIG, LoRA(dropout=0.3))
        recompute_and_compile(model, checkpointing, compile=False)
        torch.manual_seed(7)
        model(TOKENS, targets=TOKENS).backward()
        gradients.append([factor.grad for factor in adapters(model).values()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


# ------------------------------------------------------------------------------------ PEFT's files


def save(directory, model: Llama, lora: LoRA) -> None:
    directory.mkdir(exist_ok=True)
    factors = gather_adapters(model)
    save_adapter(directory, lora, model.config, factors, "base")


def base_in_transformers(tmp_path, model: Llama):
    """Return transformers' model of the weights beneath the adapters."""
    weights = {}
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            weights[name] = StoredTensor.of(parameter.detach())
    directory = tmp_path / "base"
    directory.mkdir()
    save_hf(directory, model.config, weights)
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def adapted_by_peft(tmp_path, model: Llama, **settings):
    """Return transformers' model with an adapter of PEFT's, which it has saved in adapter/."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(base_in_transformers(tmp_path, model), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    return theirs


KINDS = {
    "lora": LoRA(rank=4, alpha=12, dropout=0.1),
    "rslora": LoRA(rank=9, alpha=6.5, rslora=True, targets=("wq", "wk", "w2")),
    "dora": LoRA(rank=4, alpha=12, dora=True),
}


@torch.no_grad()
def logits_agree(ours: Llama, theirs, base) -> None:
    """Assert that both have the same logits, and that these are not those of the base."""
    expected = theirs(TOKENS).logits
    largest = expected.abs().max()
    error = (ours(TOKENS) - expected).abs().max()
    change = (base(TOKENS) - expected).abs().max()
    assert error < 1e-5 * largest
    assert change > 0.01 * largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [CONFIG, QWEN2, OLMO2, OLMO3, GEMMA3, DEEPSEEK],
    ids=["llama", "qwen2", "olmo2", "olmo3", "gemma3", "deepseek_v3"],
)
def test_peft_loads_our_adapters_and_we_load_its(tmp_path, config, kind):
    """Each has the logits of the other; PEFT saves other values than those that we wrote."""
    peft = pytest.importorskip("peft")
    lora = KINDS[kind]
    if config is DEEPSEEK:
        lora = replace(lora, targets=targets_in(config.build()))
    model = adapted(config, lora, torch.float32)
    plain = config.build()
    without = {name: p for name, p in model.state_dict().items() if "lora" not in name}
    plain.load_state_dict(without)
    adapter = tmp_path / "adapter"
    save(adapter, model, lora)
    settings, _ = open_adapter(adapter, config)
    assert settings == lora
    theirs = base_in_transformers(tmp_path, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT only warns of missing keys
        theirs = peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=True)
    logits_agree(model.eval(), theirs.eval(), plain.eval())
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapter(plain, tmp_path / "theirs")
    logits_agree(plain, theirs, model)


def test_a_layer_whose_name_ends_like_a_target_is_none(tmp_path):
    """A student's gate_w1 has no adapter, and stays as it is when others are merged."""
    lora = LoRA(rank=3)
    save(tmp_path, adapted(CONFIG, lora), lora)
    stored = {"layers.0.feed_forward.gate_w1.weight": StoredTensor.of(torch.ones(48, 32))}
    assert merged_weights(stored, tmp_path, CONFIG) == stored


SOME = [
    dict(target_modules=r".*layers\.1.*\.(q_proj|up_proj)"),
    dict(target_modules=["layers.0.mlp.down_proj", "layers.1.self_attn.k_proj"]),
    dict(target_modules=["v_proj", "o_proj"], layers_to_transform=[1]),
    dict(target_modules="all-linear", exclude_modules=r".*layers\.0.*"),
]


@pytest.mark.parametrize("some", SOME, ids=str)
def test_an_adapter_of_some_layers_is_none_on_the_others(some, tmp_path):
    plain = adapted(CONFIG, LoRA(targets=()), torch.float32)
    theirs = adapted_by_peft(tmp_path, plain, **some)
    load_adapter(plain, tmp_path / "adapter")
    logits = plain.eval()(TOKENS)
    torch.testing.assert_close(logits, theirs(TOKENS).logits)


def tensors_in(path) -> dict[str, StoredTensor]:
    """Return copies, since writing a file invalidates what was read from it."""
    found = open_safetensors(path)
    return {name: StoredTensor.of(tensor.read().clone()) for name, tensor in found.items()}


def only(part: str):
    def change(found: dict) -> dict:
        return {name: tensor for name, tensor in found.items() if part in name}

    return change


def with_more(module: str):
    def change(found: dict) -> dict:
        first = found[min(found)]
        return found | {f"base_model.model.{module}.lora_A.weight": first}

    return change


def without_the_first(found: dict) -> dict:
    return dict(list(found.items())[1:])


def of_another_shape(found: dict) -> dict:
    small = StoredTensor.of(torch.ones(8, 8))
    return found | {max(found): small}


WRONG = {  # name: a change of the tensors, and what is said
    "few": (only("q_proj"), "has no factors for"),
    "some layers of DoRA": (only("layers.1"), r"has no layers\.0.* here DoRA is on all layers"),
    "lacks": (without_the_first, "are not this Llama's"),
    "unknown": (with_more("score"), "are not this Llama's"),
    "lm_head": (with_more("lm_head"), "changes lm_head: here an adapter changes matrices"),
    "resized": (with_more("model.embed_tokens"), "changes embed_tokens: here an adapter changes"),
    "shape": (of_another_shape, "other shapes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_with_other_tensors_is_refused(tmp_path, name):
    change, says = WRONG[name]
    lora = LoRA(dora="DoRA" in name)
    save(tmp_path, adapted(CONFIG, lora), lora)
    path = tmp_path / PEFT_FILES[1]
    save_safetensors(path, change(tensors_in(path)), {})
    with pytest.raises(UserError, match=says):
        load_adapter(Llama(CONFIG), tmp_path)


SAVED = {  # how a file's names differ from those of save_pretrained
    "without PEFT's": lambda name: name.removeprefix("base_model.model."),
    "in memory": lambda name: re.sub(r"(lora_.)\.weight$|(_vector)$", r"\1\2.default.weight", name),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled within": lambda name: name.replace("model.layers", "_orig_mod.layers"),
    "DDP": lambda name: f"module.{name}",
    "all": lambda name: f"module._orig_mod.{name}".replace("base_model.model.", ""),
    "recomputed": lambda name: name.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
}


@pytest.mark.parametrize("lora", [LoRA(), LoRA(dora=True)], ids=["lora", "dora"])
@pytest.mark.parametrize("name", SAVED)
def test_names_with_other_parts_are_read(tmp_path, name, lora):
    """As of a state_dict, compiled or wrapped. In PEFT's memory, too, names have `default`."""
    model = adapted(CONFIG, lora)
    save(tmp_path, model, lora)
    _, expected = open_adapter(tmp_path, CONFIG)
    expected = {name: factor.read().clone() for name, factor in expected.items()}
    path = tmp_path / PEFT_FILES[1]
    copies = tensors_in(path)
    renamed = {SAVED[name](n): tensor for n, tensor in copies.items()}
    assert renamed.keys() != copies.keys()
    save_safetensors(path, renamed, {})
    _, read = open_adapter(tmp_path, CONFIG)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[n].read(), factor) for n, factor in expected.items())
    save_safetensors(path, copies | renamed, {})
    with pytest.raises(UserError, match="by two names, one of which is"):
        open_adapter(tmp_path, CONFIG)


def test_names_in_pefts_memory(tmp_path):
    plain = adapted(CONFIG, LoRA(targets=()), torch.float32)
    theirs = adapted_by_peft(tmp_path, plain, target_modules="all-linear", use_dora=True)
    state = {n: StoredTensor.of(t) for n, t in theirs.state_dict().items() if "lora_" in n}
    assert all("default" in name for name in state)
    save_safetensors(tmp_path / "adapter" / PEFT_FILES[1], state, {})
    load_adapter(plain, tmp_path / "adapter")
    torch.testing.assert_close(plain.eval()(TOKENS), theirs(TOKENS).logits)


VARIANTS = [
    ("peft_type", "IA3"),
    ("bias", "all"),
    ("fan_in_fan_out", True),
    ("use_rslora", "false"),
    ("rank_pattern", {"q_proj": 2}),
    ("alpha_pattern", {"q_proj": 2}),
    ("r", "8"),
    ("r", 0),
    ("lora_alpha", None),
    ("lora_dropout", -1),
    ("lora_dropout", 1.5),
    ("init_lora_weights", "pissa"),
    ("modules_to_save", ["lm_head"]),
    ("target_modules", ["q_proj", "lm_head"]),
]


@pytest.mark.parametrize("key, value", VARIANTS)
def test_variants_of_lora_are_refused(tmp_path, key, value):
    save(tmp_path, adapted(CONFIG, LoRA()), LoRA())
    change_json(tmp_path / PEFT_FILES[0], {key: value})
    named = "lm_head" if key == "target_modules" else key
    with pytest.raises(UserError, match=named):
        load_adapter(Llama(CONFIG), tmp_path)
