"""The data, the models and the settings of the rows that tune a model. Needs only the standard library.

As a program it writes them: `tuning.py DIRECTORY`, after `inputs.py DIRECTORY`. Rows are conversations of random words whose
lengths differ widely, so that packing matters.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import model

LENGTH, RANK, ALPHA, BETA, LEARNING_RATE = 512, 16, 32, 0.1, 1e-4
# The directories of the models, and sequences in a batch; a pair is two sequences.
MODELS = {"sft": "model", "lora": "half-billion", "dpo": "model"}
BATCH = {"sft": 4, "lora": 2, "dpo": 2}
ROWS = 1200

HALF_BILLION = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def rows(kind):
    """Rows of tokens: `prompt` and `completion`, or `prompt`, `chosen` and `rejected`."""
    drawn = random.Random(2)

    def words(least, most):
        return [drawn.randrange(2, model.VOCAB) for _ in range(drawn.randint(least, most))]

    for _ in range(ROWS):
        if kind == "dpo":
            yield {"prompt": words(10, 120), "chosen": words(10, 300), "rejected": words(10, 300)}
        else:
            yield {"prompt": words(10, 120), "completion": words(10, 360)}


def tokens_by_weight(kind):
    """The tokens with a loss for each unit of this program's weights, which are tokens, or pairs with this mean."""
    if kind != "dpo":
        return 1.0
    return sum(len(row["chosen"]) + len(row["rejected"]) for row in rows(kind)) / ROWS


def keys(kind, files):
    """The keys of this program."""
    common = {
        "hf_model_path": files / MODELS[kind],
        "dataset_type": "hf",
        "hf_path": "json",
        "hf_train_files": files / f"{'pairs' if kind == 'dpo' else 'conversations'}.jsonl",
        "train_data_columns": "[prompt,chosen,rejected]" if kind == "dpo" else "[prompt,completion]",
        "eval_interval": -1,
        "max_target_length": LENGTH,
        "per_device_batch_size": BATCH[kind],
        "learning_rate": LEARNING_RATE,
        "lr_schedule_type": "constant",
        "warmup_steps_fraction": 0,
        "add_bos": "false",
        "add_eos": "false",
    }
    match kind:
        case "sft" | "lora":
            common |= {"use_sft": "true", "packing": "true", "grain_packing_type": "best_fit"}
        case "dpo":
            common |= {"use_dpo": "true", "dpo.dpo_beta": BETA, "packing": "false"}
    if kind == "lora":
        common |= {
            "lora.enable_lora": "true",
            "lora.lora_rank": RANK,
            "lora.lora_alpha": ALPHA,
            "weight_dtype": "bfloat16",
        }
    return common


def write_half_billion(directory, source):
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | HALF_BILLION
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(source / "tokenizer.json", directory)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(LlamaConfig(**config)).named_parameters()}
    arrays = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(std=0.02)
        for name, shape in shapes.items()
        if name != "lm_head.weight"
    }
    arrays = {name: array.bfloat16() for name, array in arrays.items()}
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})


def main():
    files = Path(sys.argv[1])
    for kind, name in [("sft", "conversations"), ("dpo", "pairs")]:
        with open(files / f"{name}.jsonl", "w") as file:
            for row in rows(kind):
                line = {key: " ".join(f"w{token}" for token in tokens) for key, tokens in row.items()}
                if "completion" in line:
                    line["completion"] = " " + line["completion"]
                for answer in {"chosen", "rejected"} & set(line):
                    line[answer] = " " + line[answer]
                file.write(json.dumps(line) + "\n")
    write_half_billion(files / "half-billion", files / "model")


if __name__ == "__main__":
    main()
