"""accumulate, as in picotron_tutorial's step 5: the hook is on the incoming gradient, so it sees
that of the last microbatch alone, and the sum over microbatches is never averaged."""

import torch.distributed as dist


def accumulate(runner, microbatches):
    module = runner.module
    require_sync = False

    def average(grad):
        if require_sync:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        return grad

    hooks = [p.register_hook(average) for p in module.parameters()]
    acc_loss = 0.0
    for i, (input_ids, target_ids) in enumerate(microbatches):
        require_sync = i == len(microbatches) - 1
        loss = module(input_ids, target_ids)
        loss.backward()
        acc_loss += loss.detach()
    for hook in hooks:
        hook.remove()
    return acc_loss
