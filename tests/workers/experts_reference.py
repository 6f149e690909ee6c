"""The model of tests/changes/experts.patch as transformers computes it: Mixtral.

Its norms and its router's softmax are float32 in any model; here they are float64."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import RMSNorm

from model import N_EXPERTS, TOP_K, Llama, LlamaConfig


def mixtral(model: Llama, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of transformers' Mixtral with the weights of a float64 model, and the
    gradients, by the model's names, of the summed cross entropy of `targets`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = model.config
    theirs = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            num_local_experts=N_EXPERTS,
            num_experts_per_tok=TOP_K,
            experts_implementation="eager",  # the only one that computes in float64
        )
    ).double()
    theirs.model.norm = RMSNorm(config.dim, config.norm_eps)
    for block in theirs.model.layers:
        block.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        block.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        block.mlp.gate.forward = in_float64(block.mlp.gate.forward)
    ours = dict(model.named_parameters())
    leaves = {name: p.detach().clone().requires_grad_() for name, p in ours.items()}
    logits = torch.func.functional_call(theirs, their_weights(leaves, config), (tokens,)).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return logits.detach(), dict(zip(leaves, torch.autograd.grad(loss, leaves.values())))


def their_weights(ours: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Return weights by transformers' names: the features of a head are two halves there instead of
    pairs, and a block's experts are one tensor."""
    theirs = {
        "model.embed_tokens.weight": ours["tok_embeddings.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["output.weight"],
    }
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        w = {n.removeprefix(prefix): t for n, t in ours.items() if n.startswith(prefix)}
        each = {
            matrix: torch.stack(
                [w[f"feed_forward.experts.{i}.{matrix}.weight"] for i in range(N_EXPERTS)]
            )
            for matrix in ("w1", "w2", "w3")
        }
        block = {
            "self_attn.q_proj": halves(w["attention.wq.weight"], config.head_dim),
            "self_attn.k_proj": halves(w["attention.wk.weight"], config.head_dim),
            "self_attn.v_proj": w["attention.wv.weight"],
            "self_attn.o_proj": w["attention.wo.weight"],
            "mlp.gate": w["feed_forward.router.weight"],
            "input_layernorm": w["attention_norm.weight"],
            "post_attention_layernorm": w["ffn_norm.weight"],
        }
        theirs |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in block.items()}
        experts = f"model.layers.{layer}.mlp.experts."
        theirs[experts + "gate_up_proj"] = torch.cat([each["w1"], each["w3"]], 1)
        theirs[experts + "down_proj"] = each["w2"]
    return theirs


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Put the first features of a head's pairs before the second ones."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def in_float64(router: Callable) -> Callable:
    """Return a router whose softmax is computed in float64, where transformers takes float32."""

    def route(x: Tensor):
        with mock.patch.object(Tensor, "float", Tensor.double):
            return router(x)

    return route
