"""Writes families/deepseek32_groups/indexer.safetensors: the loss of the indexer and its gradients, in f32.

DeepSeek-V3.2, section 2.1: the divergence of the indexer's distribution over keys from that of the main attention, whose
weights are summed over heads and normalized, averaged over tokens and here over layers, too. `warm_up` compares all
earlier keys under dense attention, `sparse` the chosen keys under sparse attention. The model, its choice of keys and its
attention weights are transformers'; the scores follow the paper. The inputs of indexers are detached.

Needs torch, transformers and safetensors.
"""

import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

FOLDER = pathlib.Path(__file__).parent / "families/deepseek32_groups"


def scores_of(indexer, hidden, latent, angles):
    """The scores of all pairs: [batch, query, key]."""
    split = lambda x: x.split([indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim], -1)
    query = indexer.wq_b(latent.detach()).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden.detach()))[:, :, None]
    (query, query_rest), (key, key_rest) = split(query), split(key)
    query, key = apply_rotary_pos_emb(query, key, *angles, unsqueeze_dim=2)
    query, key = torch.cat([query, query_rest], -1), torch.cat([key, key_rest], -1)[:, :, 0]
    products = torch.einsum("bthd,bsd->bths", query, key).relu()
    weights = indexer.weights_proj(hidden.detach()) * indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    return torch.einsum("bths,bth->bts", products, weights)


def losses_of(model, tokens, topk):
    """The loss of each layer's indexer, over the keys that have a weight in attention."""
    inputs, chosen, hooks = [], [], []

    def record(module, given, made):
        inputs.append((module, *given[:3]))
        chosen.append(made)

    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        indexer.index_topk = topk
        hooks.append(indexer.register_forward_hook(record))
    weights = model(tokens, use_cache=False, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    losses = []
    for (indexer, hidden, latent, angles), picked, attention in zip(inputs, chosen, weights, strict=True):
        allowed = torch.zeros(*tokens.shape, length, dtype=torch.bool).scatter(-1, picked.long(), True) & causal
        target = attention.detach().sum(1)
        target = target / target.sum(-1, keepdim=True)
        assert not target[~allowed].any()
        scores = scores_of(indexer, hidden, latent, angles).masked_fill(~allowed, -torch.inf)
        log_share = scores.log_softmax(-1).masked_fill(~allowed, 0.0)
        losses.append((torch.xlogy(target, target) - target * log_share).sum(-1).mean())
    return losses


def main():
    torch.set_num_threads(1)
    tokens = load_file(FOLDER / "golden.safetensors")["tokens"].long()
    tensors = {}
    for name, is_sparse in [("sparse", True), ("warm_up", False)]:
        model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager", experts_implementation="eager")
        model = model.double().eval()
        topk = model.config.index_topk if is_sparse else tokens.shape[1]
        loss = torch.stack(losses_of(model, tokens, topk)).mean()
        loss.backward()
        tensors[f"{name}.loss"] = loss
        for key, parameter in model.named_parameters():
            is_own = ".indexer." in key
            assert is_own == (parameter.grad is not None and bool(parameter.grad.any())), key
            if is_own:
                tensors[f"{name}.{key}"] = parameter.grad
        print(name, loss.item())
    tensors = {key: value.detach().float().contiguous() for key, value in tensors.items()}
    save_file(tensors, FOLDER / "indexer.safetensors")


if __name__ == "__main__":
    main()
