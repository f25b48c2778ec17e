"""Whether the choices of an indexer are clear, for generate.py."""

import torch


def closest_choice(model, tokens):
    """The least difference between the scores of the worst chosen block and of the best other one. Blocks that no head of
    an indexer likes have equal scores, of which transformers chooses any."""
    differences, handles = [float("inf")], []
    for module in model.modules():
        if not hasattr(module, "index_topk"):
            continue
        def record(_, inputs, scores, indexer=module):
            whole = (torch.arange(scores.shape[1]) + 1) // indexer.compress_rate
            for query, count in enumerate(whole.tolist()):
                best = scores[:, query, :count].sort(descending=True).values
                if count > indexer.index_topk:
                    differences.append((best[:, indexer.index_topk - 1] - best[:, indexer.index_topk]).min().item())
        handles.append(module.scorer.register_forward_hook(record))
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return min(differences)


def choose_clearly(model, tokens):
    """Whether no indexer has two keys that tie for the last place, of which libraries choose different ones."""
    gaps, usual = [], torch.Tensor.topk

    def topk(scores, k, **options):
        if scores.dim() == 3 and scores.shape[-1] == tokens.shape[-1] > k:
            best = usual(scores, k + 1, **options).values
            gaps.append((best[..., -2] - best[..., -1])[best[..., -1] > -1e30])
        return usual(scores, k, **options)

    torch.Tensor.topk = topk
    try:
        model(tokens, use_cache=False)
    finally:
        torch.Tensor.topk = usual
    return all(gap.min() > 1e-5 for gap in gaps)
