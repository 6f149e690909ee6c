"""models/deepseek_v3.py: the published config is the preset, and the router chooses as in an
example that is worked out here. Other variants are refused, and a small model trains.

That logits, gradients and files are those of transformers is in test_model.py and test_formats.py;
test_exact.py trains it under every split."""

from dataclasses import replace

import pytest
import torch
from conftest import hf_config_of, line_of_refusal, step_of, succeed
from test_decoding import likeliest
from test_formats import DEEPSEEK, DEEPSEEK_LONG, our_model, saved, saved_hf
from test_model import tokens_of

from config import ParallelConfig
from files.conversion import export_weights
from files.loading import load_pretrained
from files.safetensors import StoredTensor, open_safetensors, save_safetensors
from finetune_lora import targets_in
from models.deepseek_v3 import TINY, V3, Router
from models.mixtral import MixtralConfig
from parallel import refusal
from perf.instruments import build_on_meta
from plumbing.messages import UserError
from techniques.decoding import generate

# The fields of the published config.json that say what is computed, without its fp8.
V3_FIELDS = dict(
    model_type="deepseek_v3", attention_bias=False, first_k_dense_replace=3, hidden_act="silu",
    hidden_size=7168, intermediate_size=18_432, kv_lora_rank=512, max_position_embeddings=163_840,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
    n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10_000,
    routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
    topk_method="noaux_tc", v_head_dim=128, vocab_size=129_280,
)  # fmt: skip
YARN = dict(
    beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, type="yarn",
    original_max_position_embeddings=4096,
)  # fmt: skip
V3_FIELDS["rope_scaling"] = YARN


def test_the_published_config_is_the_preset(tmp_path):
    assert hf_config_of(tmp_path, V3_FIELDS) == V3


@pytest.mark.parametrize("changes, message", [
    (dict(scoring_func="softmax"), "has scoring_func softmax: only sigmoid works here"),
    (dict(topk_method="greedy"), "has topk_method greedy: only noaux_tc works here"),
    (dict(norm_topk_prob=False), "has norm_topk_prob False: only True works here"),
    (dict(moe_layer_freq=2), "has moe_layer_freq 2: only 1 works here"),
    (dict(rope_interleave=False), "has rope_interleave False: only True works here"),
    (dict(n_group=None), "n_groups cannot be None"),
    (dict(n_group=7), "n_experts 256 in n_groups 7: choose n_experts as a multiple of n_groups"),
    (dict(topk_group=9), "top_groups 9 of 8 have 288 experts: choose up to 8"),
    (dict(v_head_dim=200), "value_dim 200: choose head_dim 192 at most"),
    (dict(qk_rope_head_dim="64"), "qk_rope_head_dim cannot be '64'"),
    (dict(rope_scaling=YARN | {"type": "llama3"}), "type 'llama3': only default and yarn work"),
    (dict(rope_scaling=YARN | {"beta_fast": 16}), "has beta_fast 16: only 32 works here"),
    (dict(rope_scaling=YARN | {"mscale": 0.7}), "YaRN with mscale 0.7, mscale_all_dim 1.0: only"),
    (dict(rope_scaling=YARN | {"truncate": False}), "mscale_all_dim 1.0, truncate False: only two"),
], ids=str)  # fmt: skip
def test_other_variants_are_refused_in_a_line(changes, message, tmp_path):
    assert message in line_of_refusal(hf_config_of, tmp_path, V3_FIELDS | changes)


def test_the_module_that_predicts_a_second_token_is_not_read(tmp_path, capsys):
    model = our_model(DEEPSEEK)
    file = saved_hf(tmp_path / "hf", model) / "model.safetensors"
    tensors = dict(open_safetensors(file))
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.1."):
            tensors[name.replace("layers.1.", "layers.3.")] = tensor
    tensors["model.layers.3.eh_proj.weight"] = StoredTensor.of(torch.ones(48, 96))
    save_safetensors(tmp_path / "more.safetensors", tensors, {"format": "pt"})
    (tmp_path / "more.safetensors").replace(file)
    loaded = load_pretrained(tmp_path / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert "also has a layer that predicts a second token, which is not read" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("changes, message", [
    (dict(balance="none"), "train without --balance none"),
    (dict(n_kv_heads=3), "keys for each head: n_kv_heads 6, not 3"),
])  # fmt: skip
def test_what_no_other_program_loads_is_not_written(changes, message, tmp_path):
    run = saved(tmp_path / "run", our_model(replace(DEEPSEEK, **changes)))
    with pytest.raises(UserError, match=message):
        export_weights(run, tmp_path / "out", "hf", None)


@pytest.mark.parametrize("config", [DEEPSEEK, DEEPSEEK_LONG])
def test_generation_takes_the_likeliest_tokens_of_whole_rows(config):
    model = our_model(replace(config, n_kv_heads=3), torch.float64, factor=3, norms=(0.9, 1.2))
    prompt = tokens_of(config, 9).tolist()
    (answer,) = generate(model, [prompt], 12, temperature=0)
    assert answer == likeliest(model, prompt, answer)


def test_experts_are_of_the_best_groups():
    """The best expert is in a group whose second best is poor: its group is left out. A bias
    changes the choice, and no weight."""
    config = replace(TINY, n_experts=6, n_groups=3, top_groups=1, top_k=2, routed_scale=2.0)
    router = Router(config)
    scores = torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.4, 0.3]], dtype=torch.float64))
    chosen, weights = router.choose(scores, None)
    assert chosen.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[12 / 11, 10 / 11]], dtype=torch.float64))
    bias = torch.tensor([0, 0.2, 0, 0, 0, 0], dtype=torch.float64)
    chosen, weights = router.choose(scores, bias)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1.8, 0.2]], dtype=torch.float64))


@pytest.mark.parametrize("changes, message", [
    (dict(n_groups=8), "n_experts 8 in n_groups 8: choose n_experts as a multiple"),
    (dict(n_groups=3), "n_experts 8 in n_groups 3"),
    (dict(top_k=5), "top_groups 2 of 4 have 4 experts: choose up to 4 that have top_k 5"),
    (dict(rope_dim=7), "rope_dim 7: choose an even number below head_dim 32"),
    (dict(rope_dim=32), "rope_dim 32: choose an even number below head_dim 32"),
    (dict(value_dim=33), "value_dim 33: choose head_dim 32 at most"),
    (dict(n_shared=0), "n_shared 0: choose 1 or more"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


@pytest.mark.parametrize("q_rank", [0, 48])
def test_the_weights_of_attention_are_those_of_its_matrices(q_rank):
    config = replace(TINY, q_rank=q_rank)
    attention = build_on_meta(config).layers["0"].attention
    counted = sum(p.numel() for p in attention.parameters() if p.ndim == 2)
    assert config.attention_weights == counted


def test_tensor_parallelism_that_does_not_divide_a_dense_layer_is_refused():
    config = replace(TINY, dense_dim=289)
    work = step_of(build_on_meta(config), ParallelConfig(tp=2, ep=2), 1, 1, 64)
    assert "a feed-forward width of 72 and 289 evenly: --tp must divide 1" in refusal(work)


def test_targets_are_matrices_of_the_model():
    assert targets_in(TINY.build()) == ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")
    assert targets_in(replace(TINY, q_rank=0).build(), ("wo", "wq")) == ("wq", "wo")
    for config, asked, message in (
        (TINY, ("wq", "wo", "wk"), "--targets wq wk: choose among wq_a, wq_b, wkv_a, wkv_b, wo"),
        (MixtralConfig(), ("wq_a", "wq"), "--targets wq_a: choose among wq, wk, wv, wo$"),
    ):
        with pytest.raises(UserError, match=message):
            targets_in(config.build(), asked)


def test_a_small_model_trains_and_is_tuned(corpus, sums, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    sizes = "--dim", 32, "--n-layers", 2, "--n-dense", 1, "--rope-dim", 4, "--value-dim", 6
    few = "--steps", 2, "--batch", 4, "--eval-every", 0
    succeed("train.py", "--model", "tiny-deepseek", *sizes, *few, "--seq-len", 24, "--data", corpus,
            "--out", base)  # fmt: skip
    tuning = "finetune_lora.py", "--init", base, "--data", sums, "--seq-len", 96, *few
    succeed(*tuning, "--merge", "--out", adapter)
    said = "--prompt", "1 and", "--max-new-tokens", 8, "--temperature", 0
    apart = succeed("generate.py", base, "--adapter", adapter, *said).out
    assert succeed("generate.py", adapter / "merged", *said).out == apart
    before, after = load_pretrained(base), load_pretrained(adapter / "merged")
    for name, layer in before.layers["1"].attention.named_modules():
        if name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo"):
            changed = after.get_submodule(f"layers.1.attention.{name}")
            assert not torch.equal(changed.weight, layer.weight), name
