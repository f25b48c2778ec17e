"""Writes `pressure.json`: for some reference models, 64 prompts of unequal lengths, many of which begin alike, and transformers'
greedy answers to them.

Run it with torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6.
"""

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
FAMILIES = HERE / "../../../mt-models/tests/goldens/families"
# Dense, windowed, latent and hybrid models.
MODELS = [
    "llama_six_on_two",
    "mistral_window",
    "gemma3_cycle_of_six",
    "deepseek3_groups",
    "qwen3_next_cycle",
    "bamba_every_second",
]
COUNT, ANSWER, BEGINNING, END = 64, 20, 24, 16
# The least distance of the two likeliest tokens' logits, far above what rounding makes of them.
MARGIN = 1e-4


def answer(model, prompt):
    """The greedy answer, or `None` if rounding may change it."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=ANSWER,
        return_dict_in_generate=True,
        output_logits=True,
    )
    likeliest = torch.cat(made.logits).topk(2).values
    if (likeliest[:, 0] - likeliest[:, 1]).min() < MARGIN:
        return None
    return made.sequences[0, len(prompt) :].tolist()


def main():
    torch.set_num_threads(1)
    goldens = {}
    for name in MODELS:
        eager = dict(attn_implementation="eager", experts_implementation="eager")
        model = AutoModelForCausalLM.from_pretrained(FAMILIES / name, dtype=torch.float32, **eager).eval()
        # Answers are as long as each other, whatever tokens they hold.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        draw = random.Random(name)
        tokens = lambda count: [draw.randrange(model.config.vocab_size) for _ in range(count)]
        beginnings = [tokens(BEGINNING) for _ in range(3)]
        prompts, answers = [], []
        while len(prompts) < COUNT:
            prompt = draw.choice(beginnings)[: draw.randrange(BEGINNING + 1)] + tokens(1 + draw.randrange(END))
            made = answer(model, prompt)
            if made is not None:
                prompts.append(prompt)
                answers.append(made)
        goldens[name] = {"prompts": prompts, "answers": answers}
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in goldens.items()]
    (HERE / "pressure.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
