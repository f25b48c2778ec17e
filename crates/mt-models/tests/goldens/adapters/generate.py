"""Writes */*/: adapters of the reference models in ../families as PEFT saves them, and what PEFT computes with them.

Needs torch==2.15.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0. `golden.safetensors` holds targets, logits and the loss of the tokens in
the model's own `golden.safetensors`, and for some cases the adapters after three steps of AdamW.
"""

import json
import pathlib
import shutil

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Model, name, options, whether to train.
CASES = [
    ("llama_six_on_two", "lora", dict(r=3, lora_alpha=5, target_modules=ALL), True),
    ("llama_six_on_two", "rslora", dict(r=5, lora_alpha=3, use_rslora=True, target_modules=ALL), True),
    ("llama_six_on_two", "dora", dict(r=3, lora_alpha=5, use_dora=True, target_modules=ALL), True),
    ("llama_six_on_two", "some", dict(r=1, lora_alpha=2, target_modules=["q_proj", "model.layers.1.mlp.down_proj"]), False),
    ("qwen3_untied", "lora", dict(r=7, lora_alpha=4, target_modules=ALL), False),
    ("qwen3_untied", "dora", dict(r=2, lora_alpha=3, use_dora=True, use_rslora=True, target_modules=ALL), True),
    ("gemma2_odd_untied", "lora", dict(r=3, lora_alpha=7, target_modules=ALL), True),
    ("gemma2_odd_untied", "dora", dict(r=3, lora_alpha=7, use_dora=True, target_modules=ALL), False),
]

here = pathlib.Path(__file__).parent
for index, (name, variant, options, trains) in enumerate(CASES):
    torch.manual_seed(100 + index)
    directory = here.parent / "families" / name
    target = here / name / variant
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif "lora_magnitude" in key:
                parameter.mul_(1.0 + 0.2 * torch.randn_like(parameter))
    shutil.rmtree(target, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(target)
    (target / "README.md").unlink()
    config = json.loads((target / "adapter_config.json").read_text())
    config["target_modules"].sort()
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    # The values are computed in f64 from the saved numbers.
    model = model.double()
    tokens = load_file(directory / "golden.safetensors")["tokens"].long()
    targets = torch.randint(0, model.config.vocab_size, tokens.shape)

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    logits = model(tokens, use_cache=False).logits
    tensors = {"targets": targets.int(), "logits": logits, "loss": loss_of(logits)}
    if trains:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(tokens, use_cache=False).logits).backward()
            optimizer.step()
        for key, value in get_peft_model_state_dict(model).items():
            tensors[f"after.{key}"] = value
    narrow = lambda value: value.float() if value.is_floating_point() else value
    tensors = {key: narrow(value.detach()).clone().contiguous() for key, value in tensors.items()}
    save_file(tensors, target / "golden.safetensors")
