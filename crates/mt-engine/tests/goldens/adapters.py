"""Writes `adapters.json` and `pooled.json`.

`adapters.json`: what PEFT continues prompts of unequal lengths with, for a reference model and its adapters in
../../../mt-models/tests/goldens/adapters, with the log-probabilities of all tokens of prompts and answers.
`pooled.json`: hidden states of transformers after the final norm, the last one and their mean, of texts of unequal lengths, in
f64 without the casts to f32 that models of any type have inside.

Run it with torch==2.15.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6.
"""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
GOLDENS = HERE / "../../../mt-models/tests/goldens"
BASE = "llama_six_on_two"
ADAPTERS = [None, "lora", "rslora", "dora", "some"]
LENGTHS, ANSWER = [3, 21, 7, 12], 10
POOLED = ["llama_six_on_two", "mistral_window", "gemma2_odd_untied", "qwen3_next_cycle"]
TEXTS = [1, 19, 6, 33]
# The least distance of the two likeliest tokens' logits, far above what rounding makes of them.
MARGIN = 1e-4
# The largest distance of a hidden state in f32 from that in f64. Some texts multiply rounding errors: Qwen3-Next makes 8e-6
# of those of a text of 19 tokens, and other orders of sums make up to 2e-5. Such texts are left out.
ROUNDING = 3e-6
ATTEMPTS = 6


def model_of(name, adapter=None):
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "families" / name, dtype=torch.float32, **eager)
    if adapter:
        model = PeftModel.from_pretrained(model, GOLDENS / "adapters" / name / adapter)
    # Values are computed in f64 from the saved numbers.
    return model.double().eval()


def in_f64():
    """Makes casts to f64 of casts to f32, which models of any type have inside."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double


def text(seed, length, vocab_size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def answer(model, prompt):
    tokens = list(prompt)
    for _ in range(ANSWER):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        likeliest = logits.topk(2)
        assert likeliest.values[0] - likeliest.values[1] > MARGIN
        tokens.append(likeliest.indices[0].item())
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    scores = [round(logits[place, token].item(), 8) for place, token in enumerate(tokens[1:])]
    return {"prompt": prompt, "answer": tokens[len(prompt) :], "log_probabilities": scores}


@torch.no_grad()
def pooled(model, prompt):
    hidden = model.model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
    return {"last": hidden[-1], "mean": hidden.mean(0)}


def distance(left, right):
    return max((left[key] - right[key]).abs().max().item() for key in right)


def write(name, golden):
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    torch.set_num_threads(1)
    answers = {}
    for adapter in ADAPTERS:
        model = model_of(BASE, adapter)
        prompts = [text(seed, length, model.config.vocab_size) for seed, length in enumerate(LENGTHS)]
        answers[adapter or "base"] = [answer(model, prompt) for prompt in prompts]
    write("adapters.json", answers)
    candidates, rounded, models = {}, {}, {}
    for name in POOLED:
        models[name] = model_of(name)
        seeds = [[50 + index + len(TEXTS) * attempt for attempt in range(ATTEMPTS)] for index in range(len(TEXTS))]
        size = models[name].config.vocab_size
        candidates[name] = [[text(seed, length, size) for seed in own] for own, length in zip(seeds, TEXTS)]
        narrow = model_of(name).float()
        rounded[name] = [[pooled(narrow, prompt) for prompt in own] for own in candidates[name]]
    in_f64()
    vectors = {name: [] for name in POOLED}
    for name, model in models.items():
        for prompts, narrow in zip(candidates[name], rounded[name]):
            made = [(prompt, pooled(model, prompt), own) for prompt, own in zip(prompts, narrow)]
            prompt, exact, _ = next(found for found in made if distance(found[2], found[1]) < ROUNDING)
            lists = {key: [round(value, 8) for value in vector.tolist()] for key, vector in exact.items()}
            vectors[name].append({"text": prompt, **lists})
    write("pooled.json", vectors)


main()
