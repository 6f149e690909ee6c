"""files/adapters.py refuses adapters beside other matrices than a block's seven."""

import json

import pytest
import torch

from files.adapters import PEFT_FILES, gather_adapters, open_adapter, save_adapter
from files.safetensors import StoredTensor, open_safetensors, save_safetensors
from lora import LoRA, add_adapters, init_adapters
from model import Llama, LlamaConfig
from plumbing.processes import UserError

CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=60)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("in_file", [False, True])
def test_an_adapter_of_lm_head_is_refused(tmp_path, listed, in_file):
    model = Llama(CONFIG)
    add_adapters(model, LoRA(rank=2))
    init_adapters(model)
    save_adapter(tmp_path, LoRA(rank=2), CONFIG, gather_adapters(model), "base")
    config, weights = (tmp_path / name for name in PEFT_FILES)
    if listed:
        content = json.loads(config.read_text())
        content["target_modules"].append("lm_head")
        config.write_text(json.dumps(content))
    if in_file:
        tensors = {name: t.read().clone() for name, t in open_safetensors(weights).items()}
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(2, 32)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(60, 2)
        stored = {name: StoredTensor.of(t) for name, t in tensors.items()}
        save_safetensors(weights, stored, {})
    if not (listed or in_file):
        assert open_adapter(tmp_path, CONFIG)[0] == LoRA(rank=2)
        return
    with pytest.raises(UserError, match="adapts lm_head: here LoRA works only on the seven"):
        open_adapter(tmp_path, CONFIG)
