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
