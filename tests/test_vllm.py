"""vLLM's own parsers read an export and an adapter. Its package is large, and no requirement."""

import pytest
import torch
from conftest import succeed
from test_lora import CONFIG, adapted, save, stored_base

from checkpoint import write_checkpoint
from lora import LoRA
from text.tokenizer import load_tokenizer

configs = pytest.importorskip("vllm.transformers_utils.config", reason="needs vllm")
LORA = LoRA(rank=4, alpha=12, rslora=True, targets=("wq", "wk", "w2"))


@pytest.fixture(scope="module")
def model():
    return adapted(CONFIG, LORA, torch.float32)


def test_vllm_reads_an_export(tmp_path, model):
    write_checkpoint(tmp_path / "base", CONFIG, stored_base(model), load_tokenizer("bytes"))
    succeed("checkpoint.py", "export", tmp_path / "base", tmp_path / "hf", "--format", "hf")
    read = configs.get_config(tmp_path / "hf", trust_remote_code=False)
    assert read.architectures == ["LlamaForCausalLM"] and read.vocab_size == CONFIG.vocab_size
    assert configs.get_hf_text_config(read).num_key_value_heads == CONFIG.n_kv_heads
    assert read.rope_parameters["factor"] == CONFIG.rope_scaling


def test_vllm_reads_an_adapter(tmp_path, model):
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    save(tmp_path, model, LORA)
    helper = PEFTHelper.from_local_dir(str(tmp_path), CONFIG.max_seq_len)
    helper.validate_legal(LoRAConfig(max_lora_rank=16))
    assert helper.vllm_lora_scaling_factor == LORA.alpha / LORA.rank**0.5
