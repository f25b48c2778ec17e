"""Writes reward.json and reward_model: first losses and gradient norms of a reward model as TRL's RewardTrainer computes them,
and its rewards as transformers does.

Needs torch, transformers 5.23, TRL 1.16 and datasets. The model is `llama_six_on_two` of the tests of mt-models with a random
head; each character is a token, between BOS and EOS.
"""

import json
import pathlib
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

HERE = pathlib.Path(__file__).parent
MODEL = HERE / "../../../mt-models/tests/goldens/families/llama_six_on_two"
PAIRS = [
    ("What runs. ", "The loop", "A stone sings", 0.5),
    ("Who tests. ", "All", "None of them", 0.0),
    ("When. ", "In the morning", "Now", 1.5),
    ("Where to. ", "Over the river", "Home again", -0.25),
]
TOKENS = ["<pad>", "<bos>", "<eos>", "<|turn|>", "<|end|>", *string.ascii_lowercase, *string.ascii_uppercase, *" .,:\n"]
NUMBERS = {token: number for number, token in enumerate(TOKENS)}


def encode(text):
    return [1] + [NUMBERS[character] for character in text] + [2]


rows = [encode(prompt + answer) for prompt, answer, *_ in PAIRS] + [encode(row[0] + row[2]) for row in PAIRS]
width = max(len(row) for row in rows)
ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])

torch.manual_seed(23)
model = AutoModelForSequenceClassification.from_pretrained(
    MODEL, num_labels=1, dtype=torch.float32, attn_implementation="eager"
).eval()
with torch.no_grad():
    model.score.weight.copy_(torch.randn_like(model.score.weight) * 0.3)
model.save_pretrained(HERE / "reward_model")
tokenizer = Tokenizer(models.WordLevel(NUMBERS, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
)
arguments = dict(output_dir=tempfile.mkdtemp(), report_to=[], per_device_train_batch_size=4, use_cpu=True, bf16=False,
                 gradient_checkpointing=False, disable_dropout=True, max_length=64)
some = Dataset.from_list([{"chosen": "a b", "rejected": "a c"}] * 4)
results = {}
for name, margin, coefficient in [("pairs", False, None), ("margin", True, None), ("centered", False, 0.2)]:
    trainer = RewardTrainer(model=model, args=RewardConfig(**arguments, center_rewards_coefficient=coefficient),
                            train_dataset=some, processing_class=tokenizer)
    inputs = {"input_ids": ids, "attention_mask": attention}
    if margin:
        inputs["margin"] = torch.tensor([row[3] for row in PAIRS])
    model.eval().zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    squares = sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)
    results[name] = {"loss": loss.item(), "gradient_norm": squares.sqrt().item()}
    print(name, results[name])
with torch.no_grad():
    rewards = model(input_ids=ids, attention_mask=attention).logits[:, 0].tolist()
(HERE / "reward.json").write_text(
    json.dumps({"pairs": PAIRS, "results": results, "chosen": rewards[:4], "rejected": rewards[4:]}, indent=1) + "\n"
)
