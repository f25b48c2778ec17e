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

- `eagle3`: a `config.json` of a Llama with one layer and a `pytorch_model.bin` with `fc`, `midlayer`, `norm`, `lm_head`, `d2t`
  and `t2d`, as in the repositories `yuhuili/EAGLE3-*`. The forward pass is that of `eagle/model/cnets.py` in the repository
  SafeAILab/EAGLE, on the states of layers that `eagle/model/modeling_llama_kv.py` there returns. The served model is
  `gemma3_cycle_of_six`.
- `eagle3_own`: the same in the form of vLLM's `speculators` (`transformer_layer_config`, `norm_before_residual`,
  `eagle_aux_hidden_state_layer_ids`, `layers.0`), with an embedding table of its own and a head over all tokens.

`eagle3.json` holds a prompt, an answer and drafts for both. `drafts.json` holds a prompt, its greedy answer, and for each length of text from that of the prompt and one token on the
drafts that follow it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

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


class Eagle3(torch.nn.Module):
    def __init__(self, config, num_states, width, begins_normalized, table):
        super().__init__()
        hidden = config.hidden_size
        self.begins_normalized = begins_normalized
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, hidden)
        if table is not None:
            self.embed_tokens.weight.data = table
        self.fc = torch.nn.Linear(num_states * width, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, name).out_features
            setattr(attention, name, torch.nn.Linear(2 * hidden, outputs, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        for name, weight in self.named_parameters():
            if name != "embed_tokens.weight" or table is None:
                is_norm = "norm" in name
                weight.data = is_norm + torch.randn(weight.shape) * (0.1 if is_norm else 0.3)

    def forward(self, states, following):
        layer = self.midlayer
        normalized = layer.hidden_norm(states)
        x = normalized if self.begins_normalized else states
        both = torch.cat((layer.input_layernorm(self.embed_tokens(following)), normalized), dim=-1)
        length = both.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        attended = layer.self_attn(both, position_embeddings=self.rotary(both, positions), attention_mask=mask)[0]
        x = x + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))


def eagle3_drafts(model, eagle, layers, tokens, text):
    all_states = model.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    states = torch.cat([all_states[layer] for layer in layers], dim=-1)[:, :-1]
    states = eagle.fc(states)
    following = text[1:]
    drafts = []
    for _ in range(NUM_DRAFTS):
        predicted = eagle(states, torch.tensor([following]))
        drafts.append(int(tokens[eagle.lm_head(eagle.norm(predicted[0, -1])).argmax()]))
        states = torch.cat((states, predicted[:, -1:]), dim=1)
        following = following + [drafts[-1]]
    return drafts


def eagle3(name, target, layers, is_own, draft_vocab_size):
    """Writes a decoder of EAGLE-3 that reads the states which enter these layers. Returns its golden."""
    path = TARGET.parent / target
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    vocab_size, width = model.config.vocab_size, model.config.hidden_size
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": width,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    config = LlamaConfig(**values, attn_implementation="eager")
    table = None if is_own else model.model.embed_tokens.weight.data.clone()
    eagle = Eagle3(config, len(layers), width, is_own, table).eval()
    tokens = torch.arange(vocab_size)
    weights = {key: value.clone() for key, value in eagle.state_dict().items() if "rotary" not in key}
    directory = HERE / "speculation" / name
    directory.mkdir(exist_ok=True)
    if is_own:
        del values["draft_vocab_size"]
        values = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": draft_vocab_size,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": layers,
            "transformer_layer_config": values,
        }
        weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
        save_file(weights, directory / "model.safetensors")
    else:
        del weights["embed_tokens.weight"]
        tokens = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
        weights["d2t"] = tokens - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.isin(torch.arange(vocab_size), tokens)
        torch.save(weights, directory / "pytorch_model.bin")
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    text = list(PROMPT)
    for _ in range(NUM_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    lengths = range(len(PROMPT) + 1, len(text))
    drafts = [eagle3_drafts(model, eagle, layers, tokens, text[:length]) for length in lengths]
    return {"prompt": PROMPT, "answer": text[len(PROMPT) :], "drafts": drafts}


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

    # Eight layers, of which the authors' program reads the states that enter these.
    goldens = {"eagle3": eagle3("eagle3", "gemma3_cycle_of_six", [2, 4, 5], False, 48)}
    goldens["eagle3_own"] = eagle3("eagle3_own", "llama_six_on_two", [1], True, 80)
    (out / "eagle3.json").write_text(json.dumps(goldens) + "\n")


main()
