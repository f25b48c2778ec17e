"""Drafts of EAGLE and Medusa heads, computed with transformers and PyTorch.

Usage: python speculation.py

The served model is `llama_six_on_two` of the families' goldens. The heads have random weights, and are written in their
published forms:

- `eagle`: a `config.json` of a Llama with one layer, and a `pytorch_model.bin` with `embed_tokens`, `fc` (with a bias) and a
  layer without the norm before attention, as in the repositories `yuhuili/EAGLE-*`. The forward pass is that of
  `eagle/model/cnets1.py` in the repository SafeAILab/EAGLE.
- `medusa`: a `medusa_lm_head.pt` as in the repositories `FasterDecoding/medusa-*`, with the forward pass of
  `medusa/model/medusa_model.py` in the repository FasterDecoding/Medusa.
- `medusa_vllm`: the same heads as vLLM names them (`vllm/model_executor/models/medusa.py`).

`drafts.json` holds a prompt, its greedy answer, and for each length of text from that of the prompt and one token on the
drafts that follow it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

HERE = Path(__file__).parent
TARGET = HERE / "../../../mt-models/tests/goldens/families/llama_six_on_two"
NUM_DRAFTS = 3
PROMPT = [5, 33, 8, 61, 17, 40, 2, 71, 33, 8, 19]
NUM_TOKENS = 24


def eagle_weights(config):
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    width, query = config.intermediate_size, config.num_attention_heads * config.head_dim
    layer = "layers.0."
    shapes = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        layer + "self_attn.q_proj.weight": (query, hidden),
        layer + "self_attn.k_proj.weight": (kv, hidden),
        layer + "self_attn.v_proj.weight": (kv, hidden),
        layer + "self_attn.o_proj.weight": (hidden, query),
        layer + "mlp.gate_proj.weight": (width, hidden),
        layer + "mlp.up_proj.weight": (width, hidden),
        layer + "mlp.down_proj.weight": (hidden, width),
    }
    weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    weights[layer + "post_attention_layernorm.weight"] = 1 + torch.randn(hidden) * 0.1
    return weights


class Eagle(torch.nn.Module):
    def __init__(self, config, weights):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = torch.nn.Identity()
        self.layers = torch.nn.ModuleList([layer])
        self.load_state_dict(weights)

    def forward(self, states, following, rotary):
        """States of tokens, and the tokens that follow them, to predicted states."""
        x = self.fc(torch.cat((self.embed_tokens(following), states), dim=-1))
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        made = self.layers[0](
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary(x, positions),
        )
        return made[0] if isinstance(made, tuple) else made


def eagle_drafts(model, eagle, text):
    states = model.model(torch.tensor([text]))[0][:, :-1]
    following = text[1:]
    drafts = []
    for _ in range(NUM_DRAFTS):
        predicted = eagle(states, torch.tensor([following]), model.model.rotary_emb)
        drafts.append(int(model.lm_head(predicted[0, -1]).argmax()))
        states = torch.cat((states, predicted[:, -1:]), dim=1)
        following = following + [drafts[-1]]
    return drafts


def medusa_weights(config, heads, blocks):
    hidden = config.hidden_size
    weights = {}
    for head in range(heads):
        for block in range(blocks):
            weights[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden) * 0.3
            weights[f"{head}.{block}.linear.bias"] = torch.randn(hidden) * 0.3
        weights[f"{head}.{blocks}.weight"] = torch.randn(config.vocab_size, hidden)
    return weights


def medusa_drafts(model, weights, blocks, text):
    state = model.model(torch.tensor([text[:-1]]))[0][0, -1]
    drafts = []
    for head in range(NUM_DRAFTS):
        x = state
        for block in range(blocks):
            name = f"{head}.{block}.linear."
            x = x + torch.nn.functional.silu(weights[name + "weight"] @ x + weights[name + "bias"])
        drafts.append(int((weights[f"{head}.{blocks}.weight"] @ x).argmax()))
    return drafts


@torch.no_grad()
def main():
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager").eval()
    out = HERE / "speculation"
    eagle_config = json.loads((TARGET / "config.json").read_text())
    eagle_config["num_hidden_layers"] = 1
    weights = eagle_weights(model.config)
    eagle = Eagle(model.config, weights).eval()
    (out / "eagle").mkdir(parents=True, exist_ok=True)
    (out / "eagle" / "config.json").write_text(json.dumps(eagle_config, indent=2) + "\n")
    torch.save(weights, out / "eagle" / "pytorch_model.bin")

    blocks = 2
    medusa = medusa_weights(model.config, NUM_DRAFTS + 1, blocks)
    (out / "medusa").mkdir(exist_ok=True)
    config = {"base_model_name_or_path": "llama_six_on_two", "medusa_num_heads": 4, "medusa_num_layers": blocks}
    (out / "medusa" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save(medusa, out / "medusa" / "medusa_lm_head.pt")
    of_vllm = {}
    for name, weight in medusa.items():
        head, block, *rest = name.split(".")
        own = f"blocks.{head}.layers.{block}.{rest[-1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"
        of_vllm[own] = weight
    (out / "medusa_vllm").mkdir(exist_ok=True)
    save_file(of_vllm, out / "medusa_vllm" / "model.safetensors")

    text = list(PROMPT)
    for _ in range(NUM_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    lengths = range(len(PROMPT) + 1, len(text))
    drafts = {
        "prompt": PROMPT,
        "answer": text[len(PROMPT) :],
        "eagle": [eagle_drafts(model, eagle, text[:length]) for length in lengths],
        "medusa": [medusa_drafts(model, medusa, blocks, text[:length]) for length in lengths],
    }
    (out / "drafts.json").write_text(json.dumps(drafts) + "\n")


main()
