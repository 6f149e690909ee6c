"""lora.py, files/adapters.py against adapters added by hand, and against PEFT."""

import dataclasses
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import launch, refused
from torch import nn

from checkpoint import load_pretrained, merge, write_checkpoint
from files import formats
from files.adapters import (
    PEFT_FILES,
    gather_adapters,
    load_adapter,
    open_adapter,
    save_adapter,
)
from files.formats import save_hf
from files.safetensors import StoredTensor, open_safetensors, save_safetensors
from lora import TARGETS, LoRA, LoRALinear, adapters, add_adapters, init_adapters
from model import Llama, LlamaConfig
from plumbing.processes import UserError
from techniques.recompute import recompute_and_compile

CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=64, max_seq_len=16_384, rope_scaling=8.0)


def adapted(config: LlamaConfig, lora: LoRA, dtype=torch.float64) -> Llama:
    """Return a model with adapters whose factors B, too, are not zero."""
    model = Llama(config).to(dtype)
    model.init_weights(seed=1)
    add_adapters(model, lora)
    init_adapters(model, seed=2)
    torch.manual_seed(0)
    for name, factor in adapters(model).items():
        if name.endswith("lora_B"):
            nn.init.normal_(factor, std=0.1)
        if name.endswith("lora_magnitude"):
            nn.init.uniform_(factor, 0.2, 0.4)
    return model


def tokens_of(config: LlamaConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(3))


def stored_base(model: Llama) -> dict[str, StoredTensor]:
    """Return the weights beneath the adapters, as files store them."""
    named = {name: p.detach() for name, p in model.named_parameters() if "lora" not in name}
    return {name: stored_tensor(p) for name, p in named.items()}


def stored_tensor(tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


# ------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("dora", [False, True])
def test_training_starts_from_the_model_as_it_is(dora):
    model = Llama(CONFIG)
    model.init_weights()
    before = model(tokens_of(CONFIG))
    add_adapters(model, LoRA(targets=TARGETS, dora=dora))
    init_adapters(model)
    assert torch.equal(model(tokens_of(CONFIG)), before)
    for name, factor in adapters(model).items():
        if name.endswith("lora_A"):  # uniform within 1 / sqrt(in)
            bound = factor.shape[1] ** -0.5
            assert 0.9 * bound < factor.abs().max() <= bound
            assert factor.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_merge(dtype, dora):
    model = adapted(CONFIG, LoRA(rank=3, alpha=7, targets=TARGETS, dora=dora), dtype)
    tokens = tokens_of(CONFIG)
    before = model(tokens)
    loss = model(tokens, targets=tokens).item()
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(layers) == 14
    for layer in layers:
        base = layer.weight.double()
        layer.merge()
        exact = base + 7 / 3 * layer.lora_B.double() @ layer.lora_A.double()
        if dora:
            exact *= (layer.lora_magnitude / exact.norm(dim=1))[:, None]
        assert torch.allclose(layer.weight.double(), exact, rtol=2 * torch.finfo(dtype).eps)
        merged = layer.weight.clone()
        layer.merge()  # merging twice would add the adapter twice
        assert torch.equal(layer.weight, merged)
    error = (model(tokens) - before).norm() / before.norm()
    assert error < {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    assert model(tokens, targets=tokens).item() == pytest.approx(loss, rel=2 * error.item() + 1e-13)


def test_dropout_acts_on_the_input_of_adapters():
    """It masks x and scales it up, with autograd's gradients; without gradients it does nothing."""
    layer = LoRALinear(nn.Linear(24, 16, bias=False).double(), LoRA(rank=4, dropout=0.4))
    nn.init.normal_(layer.lora_A), nn.init.normal_(layer.lora_B)
    layer.weight.requires_grad_(False)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    dropped = F.dropout(x.flatten(0, 1), 0.4).view_as(x)
    assert 0.2 < (dropped == 0).double().mean() < 0.6
    plain = x @ layer.weight.T + 4 * (dropped @ layer.lora_A.T) @ layer.lora_B.T
    assert torch.allclose(y, plain, rtol=0, atol=1e-12)
    grad = torch.randn_like(y)
    inputs = (x, layer.lora_A, layer.lora_B)
    ours, theirs = (torch.autograd.grad(out, inputs, grad) for out in (y, plain))
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    with torch.no_grad():
        update = 4 * (x @ layer.lora_A.T) @ layer.lora_B.T
        assert torch.allclose(layer(x), x @ layer.weight.T + update, rtol=0, atol=1e-12)


def test_norms_are_exact_under_autocast():
    layer = LoRALinear(nn.Linear(64, 32, bias=False), LoRA(rank=4, dora=True))
    nn.init.normal_(layer.lora_A), nn.init.normal_(layer.lora_B)
    exact = layer.weight.double() + 4 * layer.lora_B.double() @ layer.lora_A.double()
    with torch.autocast("cpu", torch.bfloat16):
        norms = layer.row_norms()
    assert torch.allclose(norms.double(), exact.norm(dim=1), rtol=1e-6)


def test_magnitudes_in_bfloat16_and_rows_of_zeros():
    """FSDP rounds magnitudes: a factor that is 1 stays 1. A row of zeros yields zeros, not NaN."""
    layer = LoRALinear(nn.Linear(64, 32, bias=False), LoRA(rank=4, dora=True))
    with torch.no_grad():
        layer.weight[3] = 0
        nn.init.normal_(layer.lora_A), nn.init.zeros_(layer.lora_B)
        layer.lora_magnitude.copy_(layer.row_norms())
    x, norms = torch.randn(5, 64), layer.row_norms()
    parameters = [getattr(layer, name) for name in LoRALinear.PARAMETERS[:4]]
    y = layer.product(x, *parameters, layer.lora_magnitude.bfloat16(), norms)
    assert torch.equal(y, x @ layer.weight.T) and not y[:, 3].any()
    layer.merge()
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_drops_the_same_again(mode):
    gradients = []
    for checkpointing in ("none", mode):
        model = adapted(CONFIG, LoRA(dropout=0.3))
        recompute_and_compile(model, checkpointing, compile=False)
        torch.manual_seed(7)
        model(tokens_of(CONFIG), targets=tokens_of(CONFIG)).backward()
        gradients.append({name: p.grad for name, p in adapters(model).items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_second_adapter_is_refused():
    model = adapted(CONFIG, LoRA())
    with pytest.raises(UserError, match="an adapter already"):
        add_adapters(model, LoRA())


# ------------------------------------------------------------------------------------ PEFT's files


def save(directory, model: Llama, lora: LoRA) -> None:
    directory.mkdir(exist_ok=True)
    save_adapter(directory, lora, model.config, gather_adapters(model), "base")


def base_of(model: Llama, directory):
    """Return the weights beneath the adapters as transformers' model."""
    import transformers

    directory.mkdir()
    save_hf(directory, model.config, stored_base(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            directory, attn_implementation="sdpa", dtype=model.norm.weight.dtype
        )
    return loaded.eval()


KINDS = {
    "lora": (CONFIG, LoRA(rank=4, alpha=12, dropout=0.1)),
    "rslora": (CONFIG, LoRA(rank=9, alpha=6, rslora=True, targets=("wq", "wk", "w2"))),
    "tied": (dataclasses.replace(CONFIG, tie_embeddings=True), LoRA(rank=4)),
    "dora": (CONFIG, LoRA(rank=4, alpha=12, dora=True)),
}


def in_peft(directory, config: LlamaConfig, lora: LoRA, dtype=torch.float32, **options):
    """Return a model with adapters, and PEFT's model of the files that we write."""
    model = adapted(config, lora, dtype)
    save(directory / "adapter", model, lora)
    base = base_of(model, directory / "base")
    return model, peft_model(base, directory / "adapter", **options)


def peft_model(base, directory, **options):
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT only warns of missing keys
        return peft.PeftModel.from_pretrained(base, directory, **options)


@torch.no_grad()
def logits_agree(ours: Llama, theirs, base) -> None:
    """Assert that both have the same logits, and that these are not those of the base."""
    tokens = tokens_of(ours.config)
    expected = theirs(tokens).logits
    assert (ours(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (base(tokens) - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapters_and_we_load_its(tmp_path, kind):
    """Each has the logits of the other; PEFT saves other values than those that we wrote."""
    config, lora = KINDS[kind]
    model, theirs = in_peft(tmp_path, config, lora, is_trainable=True)
    plain = Llama(config)
    plain.load_state_dict({n: p for n, p in model.state_dict().items() if "lora" not in n})
    logits_agree(model, theirs.eval(), plain)
    for factor in theirs.parameters():
        factor.data.mul_(1.5) if factor.requires_grad else None
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapter(plain, tmp_path / "theirs")
    logits_agree(plain, theirs, model)


@pytest.mark.slow
def test_peft_loads_our_adapters_beside_a_base_in_4_bits(tmp_path):
    """transformers quantizes the base by bitsandbytes; ours computes with the same numbers."""
    pytest.importorskip("bitsandbytes")
    import transformers

    config, lora = (
        dataclasses.replace(CONFIG, dim=128, ffn_dim=256, head_dim=0),
        LoRA(rank=4, dora=True),
    )
    model, _ = in_peft(tmp_path, config, lora)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )
    theirs = peft_model(base, tmp_path / "adapter").train()  # for inference it takes bfloat16
    before, tokens = model(tokens_of(config)).detach(), tokens_of(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers.") and name.endswith("weight") and parameter.ndim == 2:
                layer = base.get_submodule(formats.hf_name(name).removesuffix(".weight"))
                numbers = dequantized_by_bitsandbytes(layer)
                parameter.copy_(formats.to_meta_rows(name, config, numbers))
        logits, expected = model(tokens), theirs(tokens).logits
    assert (logits - expected).norm() < 1e-5 * expected.norm()
    assert (before - expected).norm() > 0.05 * expected.norm()


def dequantized_by_bitsandbytes(layer: nn.Module) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.get_base_layer().weight
    return dequantize_4bit(weight.data, weight.quant_state)


def test_gradients_of_dora_equal_pefts(tmp_path):
    """Compare every factor's gradient in float64, once its rows are in PEFT's order."""
    lora = LoRA(rank=4, alpha=12, dora=True)
    model, theirs = in_peft(tmp_path, CONFIG, lora, dtype=torch.float64, is_trainable=True)
    assert len(adapters(model)) == 14 * 3
    tokens = tokens_of(CONFIG)
    logits = theirs(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    model(tokens, targets=tokens).backward()
    expected = dict(theirs.named_parameters())
    for name, factor in adapters(model).items():
        layer, part = name.rsplit(".", 1)
        hf = formats.hf_name(f"{layer}.weight").removesuffix("weight")
        grad = formats.to_hf_rows(name, CONFIG, factor.grad)
        part = "lora_magnitude_vector" if part == "lora_magnitude" else part
        reference = expected[f"base_model.model.{hf}{part}.default.weight"].grad
        assert (grad - reference).norm() < 1e-5 * reference.norm(), name


def test_round_trip_to_the_last_bit(tmp_path):
    lora = LoRA(rank=4, alpha=1.5, dropout=0.25, rslora=True, targets=("wq", "wo", "w2"))
    model = adapted(CONFIG, lora)
    save(tmp_path, model, lora)
    found, stored = open_adapter(tmp_path, CONFIG)
    assert found == lora
    factors = adapters(model)
    assert stored.keys() == factors.keys()
    assert all(torch.equal(stored[name].read(), factors[name]) for name in factors)


def rename(directory, change) -> None:
    """Write the tensors of an adapter anew under other names."""
    found = open_safetensors(directory / PEFT_FILES[1])
    # Copies, since writing the file invalidates what was read from it.
    copies = {name: stored_tensor(t.read().clone()) for name, t in found.items()}
    save_safetensors(directory / PEFT_FILES[1], change(copies), {})


WRONG = {  # name: a change of the tensors, and what is said
    "empty": (lambda found: {}, "has no factors for"),
    "few": (lambda found: {n: t for n, t in found.items() if "q_proj" in n}, "has no factors for"),
    "prefix": (
        lambda found: {n.removeprefix("base_model.model."): t for n, t in found.items()},
        "are not this Llama's",
    ),
    "lacks": (lambda found: dict(list(found.items())[1:]), "are not this Llama's"),
    "unknown": (
        lambda found: found | {"base_model.model.score.lora_A.weight": found[min(found)]},
        "are not this Llama's",
    ),
    "a layer": (
        lambda found: {n: t for n, t in found.items() if ".layers.1." not in n},
        "are not this Llama's",
    ),
    "lm_head": (
        lambda found: found | {"base_model.model.lm_head.lora_A.weight": found[min(found)]},
        "adapts lm_head: here LoRA works only on the seven",
    ),
    "shape": (
        lambda found: found | {max(found): stored_tensor(torch.ones(8, 8))},
        "other shapes",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_file_with_other_tensors_is_refused(tmp_path, how):
    change, says = WRONG[how]
    save(tmp_path, adapted(CONFIG, LoRA()), LoRA())
    rename(tmp_path, change)
    with pytest.raises(UserError, match=says):
        load_adapter(Llama(CONFIG), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("r", "8"),
        ("r", 0),
        ("lora_alpha", None),
        ("lora_dropout", -1),
        ("lora_dropout", 1.5),
        ("use_rslora", "false"),
        ("target_modules", ["q_proj", "lm_head"]),
    ],
)
def test_variants_of_lora_are_refused(tmp_path, key, value):
    save(tmp_path, adapted(CONFIG, LoRA()), LoRA())
    path = tmp_path / PEFT_FILES[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match="lm_head" if key == "target_modules" else key):
        load_adapter(Llama(CONFIG), tmp_path)


def test_a_directory_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UserError, match="it has no adapter_config"):
        load_adapter(Llama(CONFIG), tmp_path)


# ------------------------------------------------------------------------------------------ merged


@pytest.mark.parametrize(
    "tied, lora", [(False, LoRA(3)), (True, LoRA(3)), (False, LoRA(3, dora=True))]
)
def test_merged_checkpoint(tmp_path, tied, lora):
    """A base and its adapter give one model that computes alike."""
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    model, tokens = adapted(config, lora, torch.float32), tokens_of(config)
    save(tmp_path / "adapter", model, lora)
    write_checkpoint(tmp_path / "base", config, stored_base(model), None)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", None)
    merged, expected = load_pretrained(tmp_path / "merged"), model(tokens)
    assert merged.config == config
    assert (merged(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_an_adapter_is_no_model(tmp_path):
    save(tmp_path, adapted(CONFIG, LoRA()), LoRA())
    refused(launch("generate.py", tmp_path), "is an adapter", "--adapter, with base")
