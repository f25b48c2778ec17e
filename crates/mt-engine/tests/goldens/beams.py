"""Writes `beams.json`: what beam search of transformers finds with reference models.

Run it with torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6.
"""

import json
from pathlib import Path

import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
FAMILIES = HERE / "../../../mt-models/tests/goldens/families"
MODELS = ["llama_six_on_two", "mistral_window", "deepseek3_groups", "qwen3_next_cycle"]
LENGTH = 14
# Beams, length penalty, early stopping, answers, and the places of the greedy answer whose tokens end texts.
SEARCHES = [
    (1, 1.0, False, 1, [6]),
    (2, 1.0, False, 1, []),
    (3, 1.0, False, 3, [4]),
    (4, 0.5, False, 2, [2, 7]),
    (4, 2.0, "never", 4, [5]),
    (3, 2.0, True, 2, [3, 5]),
    (5, 0.0, False, 5, [1]),
    (3, -1.0, "never", 2, [4]),
]


def searched(name: str) -> list:
    directory = FAMILIES / name
    prompts = load_file(directory / "golden.safetensors")["tokens"]
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32, **eager).eval()
    model.generation_config.pad_token_id = 0
    cases = []
    for number, (beams, penalty, early, answers, places) in enumerate(SEARCHES):
        prompt = torch.tensor(prompts[number % 2 : number % 2 + 1, : 5 + number], dtype=torch.int64)
        inputs = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=LENGTH)
        model.generation_config.eos_token_id = None
        greedy = model.generate(prompt, num_beams=1, **inputs)[0, prompt.shape[1] :].tolist()
        stop = sorted({greedy[place] for place in places})
        model.generation_config.eos_token_id = stop or None
        found = model.generate(
            prompt,
            num_beams=beams,
            length_penalty=penalty,
            early_stopping=early,
            num_return_sequences=answers,
            return_dict_in_generate=True,
            output_scores=True,
            **inputs,
        )
        texts = []
        for row in found.sequences[:, prompt.shape[1] :].tolist():
            end = next((place for place, token in enumerate(row) if token in stop), None)
            texts.append({"tokens": row[:end], "is_stopped": end is not None})
        scores = found.sequences_scores.tolist() if beams > 1 else None
        cases.append(
            {
                "prompt": prompt[0].tolist(),
                "beams": beams,
                "length_penalty": penalty,
                "early_stopping": early,
                "stop": stop,
                "max_new_tokens": LENGTH,
                "texts": texts,
                "scores": scores,
            }
        )
    return cases


def main():
    torch.set_num_threads(1)
    golden = {name: searched(name) for name in MODELS}
    lines = [f"{json.dumps(name)}: {json.dumps(cases)}" for name, cases in golden.items()]
    (HERE / "beams.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
