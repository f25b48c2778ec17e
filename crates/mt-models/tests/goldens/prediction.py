"""Writes families/deepseek3_predicting: a DeepSeek-V3 with two modules that predict further tokens, as published.

Published files (DeepSeek-V3, README_WEIGHTS.md) hold the modules behind the last layer: `enorm`, `hnorm`, `eh_proj`, a layer
like the others, `shared_head.norm`, and copies of the embedding and of the output matrix. The module k combines the
normalized embedding of the token k places ahead with the normalized output of the model, or of the module before it, and
its output predicts the token after that one (technical report, section 2.2). Outputs are normalized by `model.norm` and by
`shared_head.norm`: DeepSeek's modeling code, SGLang and vLLM pass them on so.

The model and the layers are transformers'. Needs torch, transformers and safetensors.
"""

import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.masking_utils import create_causal_mask

from families.generate import published, randomize

FAMILIES = pathlib.Path(__file__).parent / "families"
SOURCE, TARGET = FAMILIES / "deepseek3_groups", FAMILIES / "deepseek3_predicting"
MODULES, WEIGHT = 2, 0.1


class Module(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm = DeepseekV3RMSNorm(width), DeepseekV3RMSNorm(width)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        # The last layer has experts.
        layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.shared_head = torch.nn.ModuleDict({"norm": DeepseekV3RMSNorm(width)})

    def forward(self, embedding, hidden, angles, mask):
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))
        x = x + self.self_attn(self.input_layernorm(x), angles, attention_mask=mask)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def predictions_of(model, modules, tokens):
    """The logits of each module, for the positions whose tokens it reads."""
    body = model.model
    positions = torch.arange(tokens.shape[1])[None]
    hidden = body(tokens, use_cache=False).last_hidden_state
    embedded = body.embed_tokens(tokens)
    angles = body.rotary_emb(embedded, positions)
    mask = create_causal_mask(model.config, embedded, None, None, position_ids=positions)
    logits = []
    for ahead, module in enumerate(modules, 1):
        # What follows the last token is not read by the positions that count.
        following = torch.cat([tokens[:, ahead:], tokens.new_zeros(len(tokens), ahead)], 1)
        hidden = module.shared_head["norm"](module(body.embed_tokens(following), hidden, angles, mask))
        logits.append(model.lm_head(hidden)[:, :-ahead])
    return logits


def main():
    torch.set_num_threads(1)
    torch.manual_seed(5)
    tokens = load_file(SOURCE / "golden.safetensors")["tokens"].long()
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(SOURCE, **eager).float().eval()
    modules = torch.nn.ModuleList(Module(model.config) for _ in range(MODULES)).eval()
    modules.config = model.config
    randomize(modules)
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    config = json.loads((SOURCE / "config.json").read_text()) | {"num_nextn_predict_layers": MODULES}
    (TARGET / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(SOURCE / "generation_config.json", TARGET)

    def in_files(tensors):
        """Names as in files: those of modules follow the last layer."""
        first = model.config.num_hidden_layers
        made = {}
        for key, value in tensors.items():
            number, _, rest = key.partition(".")
            made[f"model.layers.{first + int(number)}.{rest}"] = value
        return made

    state = published(modules, {key: value for key, value in modules.named_parameters()})
    state = in_files(state)
    for module in range(MODULES):
        prefix = f"model.layers.{model.config.num_hidden_layers + module}"
        state[f"{prefix}.embed_tokens.weight"] = model.model.embed_tokens.weight
        state[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight
    write = lambda name, tensors: save_file(
        {key: value.detach().float().clone().contiguous() for key, value in tensors.items()}, TARGET / name, {"format": "pt"}
    )
    write("model.safetensors", load_file(SOURCE / "model.safetensors") | state)

    model, modules = model.double(), modules.double()
    logits = predictions_of(model, modules, tokens)
    count, total = 0, 0.0
    for ahead, own in enumerate(logits, 1):
        targets = tokens[:, ahead + 1:]
        total += torch.nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        count += targets.numel()
    loss = WEIGHT * total / count
    loss.backward()
    gradient = lambda own: {key: value.grad for key, value in own.named_parameters() if value.grad is not None}
    result = {"loss": loss} | {f"logits_{ahead}": own for ahead, own in enumerate(logits, 1)}
    of_modules = in_files({key: value for key, value in published(modules, gradient(modules)).items() if not key.endswith("bias")})
    write("predictions.safetensors", result | published(model, gradient(model)) | of_modules)
    print(loss.item(), [own.std().item() for own in logits])


if __name__ == "__main__":
    main()
