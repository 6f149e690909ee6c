"""Find in a changed model what neither its gradients nor its logits show: initial values that are
replaced, losses of other tokens than the next one, integers that make torch.compile slow, and a
small model that cannot be computed."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn

from files.published import small_logits, with_fixed_weights
from model import IGNORE, LlamaConfig
from models.family import family_of
from plumbing.messages import UserError
from runs.equal import describe, small_batch, small_config

SMALL = 1e-3  # what matrices are multiplied by, so that a block adds little to x


@torch.no_grad()
def notes(config: LlamaConfig, compiles: bool) -> list[str]:
    """Return a line for each of these that a small model of this configuration has."""
    small = small_config(config, config.n_layers)
    lines = []
    if replaced := set_in_init(small):
        lines.append(
            f"note: the values that __init__ gives to {named(replaced)} are replaced, since a "
            f"model is built without values: give the class of the layer an initial_value"
        )
    if unnamed := added_to_stream(small):
        lines.append(
            f"note: the output of {named(unnamed)} is added to x: name it in writes_to_stream of "
            f"the module around it, so that it starts smaller"
        )
    if ahead := predicted_ahead(small):
        tokens = " and ".join(str(number) for number in ahead)
        lines.append(
            f"note: in training there is another loss, of the token that is {tokens} after the "
            f"last one seen; the next token is 1 after it"
        )
    family = family_of(config)
    if small_logits(family) is None:
        lines.append(
            f"note: {family.name} cannot compute its small model, by which checkpoints tell "
            f"changed code: give Family(small=...) with fields that fit SMALL of models/family.py"
        )
    if compiles and (integers := integers_read(small)):
        lines.append(
            f"note: torch.compile makes a graph for each value of {named(integers)}, an integer "
            f"that differs between layers: make a bool of it in __init__"
        )
    return lines


def named(names: list[str]) -> str:
    """Return the first of some names, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} ({len(names)} of them)"


def set_in_init(config: LlamaConfig) -> list[str]:
    """Return the parameters to which __init__ gives values that init_weights replaces by others,
    but for layers whose class says their initial_value.

    torch's own layers draw random numbers once when they are made. So what was written twice was
    set on purpose, and so was a constant."""
    with torch.random.fork_rng(devices=[]):
        model = config.build()
    before = {name: (p.detach().clone(), p._version) for name, p in model.named_parameters()}
    model.init_weights()
    found = []
    for name, parameter in model.named_parameters():
        if hasattr(model.get_submodule(name.rpartition(".")[0]), "initial_value"):
            continue
        value, times_written = before[name]
        is_constant = bool((value == value.flatten()[0]).all())
        if (is_constant or times_written > 1) and not torch.equal(value, parameter):
            found.append(name)
    return found


def added_to_stream(config: LlamaConfig) -> list[str]:
    """Return the layers of blocks whose output is added to x and that no writes_to_stream names.

    All matrices are small, so that a block returns nearly x. A change of such an output then
    arrives at the end of the block as it is, or times a number."""
    model = with_fixed_weights(config.build().double())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(SMALL)
    model.tok_embeddings.weight.div_(SMALL)
    inputs = {}
    hooks = [
        block.register_forward_pre_hook(lambda block, args: inputs.update({block: args}))
        for block in model.layers.values()
    ]
    model(small_batch(1, 8, config).tokens)
    for hook in hooks:
        hook.remove()
    change = torch.randn(1, 8, config.dim, generator=torch.Generator().manual_seed(0)).double()
    found = []
    for number, block in model.layers.items():
        plain = stream_of(block(*inputs[block]))
        for path, layer in block.named_modules():
            parent, _, name = path.rpartition(".")
            is_layer = isinstance(layer, nn.Linear) and layer.out_features == config.dim
            if not is_layer or name in block.get_submodule(parent).writes_to_stream:
                continue
            hook = layer.register_forward_hook(lambda *args: args[-1] + change)
            if is_multiple(stream_of(block(*inputs[block])) - plain, change):
                found.append(f"layers.{number}.{path}")
            hook.remove()
    return found


def stream_of(returned: Tensor | tuple) -> Tensor:
    """Return x of what a block returns: x, or x and something that it hands on."""
    return returned[0] if isinstance(returned, tuple) else returned


def is_multiple(found: Tensor, change: Tensor) -> bool:
    factor = (found * change).sum() / change.square().sum()
    return bool(factor.abs() > 0.01 and (found - factor * change).norm() < 0.1 * found.norm())


@torch.enable_grad()
def predicted_ahead(config: LlamaConfig) -> list[int]:
    """Return how many tokens ahead training predicts besides the next one, from the last token
    seen: with the last target alone, those positions of x have a gradient that predict it."""
    model = with_fixed_weights(config.build().double()).train()
    streams = []
    model.norm.register_forward_pre_hook(lambda norm, inputs: streams.append(inputs[0]))
    tokens = small_batch(1, 8, config).tokens
    targets = torch.full_like(tokens, IGNORE)
    targets[0, -1] = 1
    loss = model(tokens, targets)
    ahead = set()
    for gradient in torch.autograd.grad(loss, streams, allow_unused=True):
        if gradient is not None:
            positions = gradient.abs().sum((0, 2)).nonzero()
            ahead |= {8 - position for position in positions.flatten().tolist()}
    return sorted(ahead - {1})


def integers_read(config: LlamaConfig) -> list[str]:
    """Return the attributes of modules in blocks that forward reads in training, and that are
    integers with more than two values."""
    model = with_fixed_weights(config.build()).train()
    values = {}  # (path in a block, attribute) -> its values in all blocks
    for block in model.layers.values():
        for path, module in block.named_modules():
            for attribute, value in vars(module).items():
                if type(value) is int:
                    values.setdefault((type(module), path, attribute), set()).add(value)
    differing = {key for key, of_key in values.items() if len(of_key) > 2}
    read = set()

    def noting(self: nn.Module, attribute: str) -> object:
        read.add((type(self), attribute))
        return object.__getattribute__(self, attribute)

    with mock.patch.multiple(nn.Module, create=True, __getattribute__=noting):
        model(*small_batch(1, 8, config).inputs)
    found = [(path, name) for kind, path, name in differing if (kind, name) in read]
    return [f"{path}.{name}".lstrip(".") for path, name in sorted(found)]


def check_attend(config: LlamaConfig, instead: str) -> None:
    """Raise UserError if `attend` of model.py draws random numbers, as dropout does, or needs a
    mask. Under --cp and with packed documents a GPU's kernel attends, and would draw none: so the
    random states after both differ. `instead` is what else can be done."""
    model, batch, states = with_fixed_weights(config.build()).train(), small_batch(1, 8, config), []
    other = SimpleNamespace(have_kernel=lambda *_: True, attention=lambda q, *_: q)

    def attend_by(documents) -> None:
        torch.manual_seed(0)
        model(batch.tokens, batch.targets, torch.arange(8)[None], documents=documents)
        states.append(torch.get_rng_state())

    attend_by(None)
    try:
        attend_by(other)
    except Exception as error:
        raise UserError(
            f"attend has no mask here, but an object whose `attention` is to be called, as attend "
            f"of model.py does ({describe(error)}): {instead}"
        )
    if not torch.equal(*states):
        raise UserError(
            f"attend has dropout, and here a GPU attends by a kernel without it: {instead}, or "
            f"drop out what Attention.forward writes"
        )
