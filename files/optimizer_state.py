"""The state of an optimizer by name, as checkpoints hold it."""

import torch
from torch import Tensor

from plumbing.messages import UserError
from plumbing.shards import to_local

STATE_ADVICE = "keep all its state, counts of steps too, as tensors in its own state[parameter]"


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as NAME.KEY; AdamW's keys are exp_avg, exp_avg_sq and step.

    The tensors share its memory. NAME is the parameter's name in the optimizer, since with ZeRO-1
    the optimizer updates slices of the model's parameters. Settings, such as weight decay, are not
    saved: a resumed run takes them from its flags. Raises UserError for an optimizer with any other
    state, which a checkpoint would not hold."""
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        refuse(optimizer, STATE_ADVICE)  # it is in the optimizer that this one wraps
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        refuse(optimizer, "name its parameters, as optimizer_parameters(model).items() does")
    if not optimizer.state:
        create_state(optimizer)
    named = {}
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                named[f"{name}.{key}"] = value
    is_whole = len(named) == sum(map(len, optimizer.state.values()))
    if not is_whole or not all(isinstance(value, Tensor) for value in named.values()):
        refuse(optimizer, STATE_ADVICE)
    return named


def refuse(optimizer: torch.optim.Optimizer, advice: str) -> None:
    """Raise UserError with advice to the author of an optimizer."""
    raise UserError(f"{type(optimizer).__name__} cannot be saved: {advice}")


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a new optimizer allocate its state, by a step with gradients and learning rate zero.

    AdamW changes no weight then, since it multiplies weight decay by the learning rate. Raises
    UserError for an optimizer that does, or that counts steps outside of its state."""
    counters = _counters(optimizer)
    weights = _checksum(optimizer)
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates):
        group["lr"] = lr
    if _counters(optimizer) != counters:
        refuse(optimizer, STATE_ADVICE)
    if _checksum(optimizer) != weights:
        refuse(optimizer, "multiply all that it subtracts from weights by the learning rate")


def _counters(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the plain numbers that an optimizer keeps outside of its state."""
    counters = []
    for values in (vars(optimizer), *optimizer.param_groups):
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float, tuple))}
        counters.append(numbers)
    return counters


@torch.no_grad()
def _checksum(optimizer: torch.optim.Optimizer) -> str:
    """Return a number for each parameter that changes if the parameter does, as text: so a NaN is
    what it was."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += [to_local(parameter) for parameter in group["params"]]
    norms = [norm.double() for norm in torch._foreach_norm(parameters)]
    return str(torch.stack(norms).tolist())
