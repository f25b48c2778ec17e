"""How far rounding errors in weights grow in training steps."""

import torch


def relative(left, right):
    if not right.any():
        return left.abs().max().item()
    return ((left.double() - right.double()).norm() / right.double().norm()).item()


def sensitivity(make, three_steps, tokens, exact, before):
    """The largest relative changes of gradient norms and of updates if weights are rounded to f32 in another way."""
    of_norms, of_updates = 0.0, 0.0
    for seed in range(4):
        model = make().double()
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-24 * torch.randn(parameter.shape, generator=noise).double())
        other = three_steps(model, tokens)
        of_norms = max(of_norms, relative(other["gradient_norms"], exact["gradient_norms"]))
        of_updates = max(of_updates, *(relative(other[key] - value, exact[key] - value) for key, value in before.items()))
    return of_norms, of_updates
