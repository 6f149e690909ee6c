"""Check that model.py, as it may have been changed, computes the same under tensor parallelism."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from model import Llama, LlamaConfig
from plumbing.fingerprint import fixed_weight
from plumbing.processes import UserError
from tensor_parallel import tensor_parallel


def check_tensor_parallel(config: LlamaConfig, mesh: DeviceMesh) -> None:
    """Raise UserError on all ranks if a small model has another loss or another gradient when it
    is sharded over a mesh of one dimension.

    PLAN places all parameters, but cannot know what a change does between column-parallel and
    row-parallel layers, where a rank has some of the features, nor in the loss, where it has some
    of the vocabulary."""
    tp = mesh.size()
    if tp == 1:
        return
    small = dict(dim=8 * tp, n_layers=1, n_heads=2 * tp, n_kv_heads=tp, ffn_dim=6 * tp)
    config = replace(config, **small, vocab_size=5 * tp)
    tokens = torch.arange(4 * tp, device=mesh.device_type)[None] ** 2 % (5 * tp)
    expected, found = (_loss_and_gradients(config, tokens, m) for m in (None, mesh))
    for name, value in expected.items():
        if (found[name] - value).norm() > 1e-9 * value.norm():
            raise UserError(
                f"--tp computes another {name} than one process, since model.py was changed: from "
                f"wq to wo a rank has some of the heads, from w1 to w2 some of the features, and "
                f"in the loss some of the vocabulary"
            )


def _loss_and_gradients(
    config: LlamaConfig, tokens: torch.Tensor, mesh: DeviceMesh | None
) -> dict[str, torch.Tensor]:
    model = Llama(config).double().to(tokens.device).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fixed_weight(name, parameter))
    if mesh:
        tensor_parallel(model, mesh)
    loss = model(tokens, targets=tokens)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        is_sharded = isinstance(gradient, DTensor)
        found[f"gradient of {name}"] = gradient.full_tensor() if is_sharded else gradient
    return found
