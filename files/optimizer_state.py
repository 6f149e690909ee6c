"""The state of an optimizer by name, as checkpoints hold it."""

import torch
from torch import Tensor

from plumbing.processes import UserError
from plumbing.shards import to_local


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as NAME.KEY; AdamW's keys are exp_avg, exp_avg_sq and step.

    The tensors share its memory. NAME is the parameter's name in the optimizer, since with ZeRO-1
    the optimizer updates slices of the model's parameters. Settings, such as weight decay, are not
    saved: a resumed run takes them from its flags. Raises UserError for an optimizer with any other
    state, which a checkpoint would not hold."""

    def refuse(reason: str):
        raise UserError(f"{type(optimizer).__name__} cannot be saved: {reason}")

    groups = optimizer.param_groups
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        refuse("its state is in another optimizer that it wraps; --dp zero1 shards AdamW's state")
    if not all("param_names" in group for group in groups):
        refuse("its parameters have no names; make it of optimizer_parameters(model).items()")
    if not optimizer.state:
        create_state(optimizer)
    named = {
        f"{name}.{key}": value
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"])
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if len(named) < sum(map(len, optimizer.state.values())):
        refuse("keep all its state in state[parameter]")
    for name, value in named.items():
        if not isinstance(value, Tensor):
            refuse(f"its {name} is {value!r:.60}; keep it as a tensor")
    return named


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a new optimizer allocate its state, by a step with gradients and learning rate zero.

    AdamW changes no weight then, since it multiplies weight decay by the learning rate. Raises
    UserError for an optimizer that does, or that counts steps outside of its state."""
    kind, counters, weights = type(optimizer).__name__, _counters(optimizer), _checksum(optimizer)
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
        raise UserError(
            f"{kind} cannot be saved: it counts in its attributes or param_groups; keep the count "
            f"as a tensor in state[parameter]"
        )
    if _checksum(optimizer) != weights:
        raise UserError(
            f"{kind} cannot be saved: it changes weights at a learning rate of 0, which a resumed "
            f"run uses to make its state; multiply all it subtracts by the learning rate"
        )


def _counters(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the plain numbers that an optimizer keeps outside of its state."""
    return [
        {key: value for key, value in values.items() if isinstance(value, (int, float, tuple))}
        for values in (vars(optimizer), *optimizer.param_groups)
    ]


@torch.no_grad()
def _checksum(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return a number for each parameter that changes if the parameter does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norms = torch._foreach_norm([to_local(parameter) for parameter in parameters])
    return torch.stack([norm.double() for norm in norms]).tolist()
