"""Warn of faults of a changed model.py that training would not show, and refuse attention within
documents that differs from its mask. Notes on initial values and on layers are in runs/unseen.py.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from config import ParallelConfig
from files.published import computes, with_fixed_weights
from model import Llama, LlamaConfig
from models.family import family_of
from parallel import BEFORE_TP, World, set_dtype
from plumbing.messages import UserError
from runs import equal
from techniques.kv_cache import KVCache
from text.batch import kernel_widths


@torch.no_grad()
def check_documents(config: LlamaConfig, world: World, packed: bool = False) -> None:
    """Raise UserError if a small model has different logits with document_mask and with the kernel
    that replaces it in training on a GPU; or, where rows are `packed`, if attend has dropout, which
    the kernel lacks."""
    device, parallel = world.device, world.parallel
    if config.head_dim not in kernel_widths(device.type, parallel.dtype):
        return
    if packed:
        from runs.unseen import check_attend  # here, since few runs on a GPU ask for it

        check_attend(equal.small_config(config), "packed documents are for models without it")
    model = (small := equal.small_config(config, 4)).build()
    if small.ffn_uses > 1:  # by rounding, tokens might choose other feed-forwards
        for block in model.layers.values():
            block.feed_forward = nn.Identity()
    model = with_fixed_weights(model).to(device)
    set_dtype(model, replace(parallel, dp="ddp"))  # by autocast
    batch = equal.small_batch(1, 1024, small, packed=True).to(device)
    by_mask = model(batch.tokens, positions=batch.positions)
    by_kernel = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    if not equal.relative_difference(by_kernel, by_mask) <= 0.03:  # bfloat16's roundings add up
        raise UserError(
            "Documents.attention and document_mask give other logits, since model.py was changed: "
            "change both alike, or remove the entry of DOCUMENT_KERNELS"
        )


@torch.no_grad()
def notes(whole: Llama, parallel: ParallelConfig) -> str:
    """Return a line for each thing that training would not show: a validation loss that is not the
    cross entropy of the logits, generation with other logits than training, documents that depend
    on each other, a layer that adapters or 8 bits replace and model.py never calls."""
    small = equal.small_config(whole.config, whole.config.n_layers)
    model = with_fixed_weights(small.build().double())
    T = 150  # longer than a short window
    tokens = equal.small_batch(2, T, small).tokens
    lines = []
    called = set()
    layers = {name: m for name, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    logits, positions = model(tokens), torch.arange(T).repeat(2, 1)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    in_validation = model(tokens, targets=tokens)
    if not equal.relative_difference(in_validation, loss) <= equal.TOLERANCE:
        each, of_logits = in_validation / tokens.numel(), loss / tokens.numel()
        lines.append(
            f"note: in validation the loss is {each:.4g} a token, and the cross entropy of the "
            f"logits that generation uses {of_logits:.4g}: a change of logits belongs in "
            f"logits_of, one of the loss in loss_of, or under `if self.training`"
        )
    cache = KVCache(T)
    try:
        for part in (slice(0, T - 2), slice(T - 2, T - 1), slice(T - 1, T)):
            last = model(tokens[:, part], positions=positions[:, part], cache=cache)
        is_equal = equal.relative_difference(last[:, 0], logits[:, -1]) <= equal.TOLERANCE
        problem = "" if is_equal else "computes other logits than training"
    except Exception as error:
        problem = f"fails ({equal.describe(error)})"
    if problem:
        lines.append(
            f"note: generation {problem}: only attention has a cache, and another layer that mixes "
            f"tokens needs one of its own"
        )
    alone = model(tokens[:, 50:], positions=positions[:, :-50])
    in_a_row = model(tokens, positions=torch.cat([positions[:, :50], positions[:, :-50]], 1))
    if not equal.relative_difference(in_a_row[:, 50:], alone) <= equal.TOLERANCE:
        lines.append(
            "note: with --document-mask and in fine-tuning, a document depends on the one before "
            "it: only attend, which is given a mask, stays within documents"
        )
    is_replaced = any(technique.is_used(parallel) for technique in BEFORE_TP)
    is_replaced |= any(not p.requires_grad for p in whole.parameters())  # by adapters
    uncalled = {name.partition(".")[2] for name in layers.keys() - called}
    for name in sorted(uncalled) if is_replaced else ():
        lines.append(
            f"note: adapters and 8 bits have no effect in {name}, which model.py does not call: "
            f"write {name.rpartition('.')[2]}(x) there, not F.linear(x, its weight)"
        )
    from runs import unseen  # here, so that who reads train.py need not read it

    lines += unseen.notes(whole.config, parallel.compile)
    return "\n".join(lines)


def prediction_note(config: LlamaConfig) -> str:
    """Return a note that predictions of memory and bytes may be wrong, if the model is one of a
    student's file, or its code was changed."""
    family = family_of(config)
    if family.published and computes(family.published.logits, family):
        return ""
    return f"note: {family.name} is here no published model: bench.py step counts what it sends"
