"""Writes `greedy.json`: what transformers continues the reference models' first tokens with.

Run it with torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6.
"""

import json
from pathlib import Path

import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
FAMILIES = HERE / "../../../mt-models/tests/goldens/families"
PROMPT, ANSWER = 5, 12
LEFT_OUT = [
    # Its frequencies follow the length, which transformers changes under keys that are cached already.
    "llama_dynamic_ntk",
    # transformers generates nothing with a model that has no layer of attention.
    "qwen3_5_moe_linear_one_layer",
    "qwen3_next_linear_one_layer",
]
# The least distance of the two likeliest tokens' logits, far above what rounding makes of them.
MARGIN = 1e-4


def answers(directory: Path) -> dict:
    tokens = load_file(directory / "golden.safetensors")["tokens"][:, :PROMPT]
    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = kind.from_pretrained(directory, dtype=torch.float32, **eager).eval()
    # Answers are as long as each other, whatever tokens they hold.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = torch.tensor(tokens, dtype=torch.int64)
    generated = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=ANSWER,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for logits in generated.logits:
        likeliest = logits.topk(2).values
        assert (likeliest[:, 0] - likeliest[:, 1]).min() > MARGIN, directory.name
    return {"prompts": tokens.tolist(), "answers": generated.sequences[:, PROMPT:].tolist()}


def main():
    torch.set_num_threads(1)
    directories = sorted(path.parent for path in FAMILIES.glob("*/golden.safetensors"))
    golden = {directory.name: answers(directory) for directory in directories if directory.name not in LEFT_OUT}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items()]
    (HERE / "greedy.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
