"""Writes first_losses.json: losses and gradient norms of first steps of supervised fine-tuning, preference optimization with
another reference, process rewards and distillation.

Needs torch, transformers 5.24, TRL 1.16 and datasets. The model is `llama_six_on_two` of the tests of mt-models; each
character is a token, between BOS and EOS. The other model, a reference and a teacher, is the same one with half of its output
head. Losses of tokens and of pairs are TRL's; those of judged steps are what transformers computes for classes of tokens, on
the layers of `reward_model` with its head and the negative one, because TRL 1.16 has no PRMTrainer; distillation is MaxText's
mixture.
"""

import json

import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

from first_steps import COMMON, HERE, MODEL, ROWS, load, padded, plain, record, results, tokenizer

STEPS = [
    ("What runs. ", ["The loop", "A stone"], [True, False]),
    ("Who tests. ", ["All"], [True]),
    ("When. ", ["Now", "In the morning", "Never"], [False, True, False]),
    ("Where to. ", ["Home", "Over the river"], [True, True]),
]


def tokens_of(answer):
    """Rows of tokens, the numbers of their prompts' tokens, and rows of ones, up to the end of each."""
    prompts = [[1] + plain(row[0]) for row in ROWS]
    whole = [prompt + plain(row[answer]) + [2] for prompt, row in zip(prompts, ROWS)]
    return whole, [len(prompt) for prompt in prompts], [[1] * len(row) for row in whole]


# Tokens of answers.
whole, starts, present = tokens_of(1)
masks = [[0] * start + [1] * (len(row) - start) for row, start in zip(whole, starts)]
examples = [{"input_ids": row, "completion_mask": mask} for row, mask in zip(whole, masks)]
for name, loss_type in [("supervised", "nll"), ("dft", "dft")]:
    model = load()
    config = SFTConfig(**COMMON, loss_type=loss_type, completion_only_loss=True, shuffle_dataset=False)
    trainer = SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    count = torch.tensor(sum(sum(mask) for mask in masks))
    model.eval().zero_grad()
    record(name, model, trainer.compute_loss(model, dict(batch), num_items_in_batch=count))

# Pairs.
rejected, _, rejected_present = tokens_of(2)
ids, attention = padded(whole + rejected), padded(present + rejected_present)
answers = padded(masks + [[0] * start + [1] * (len(row) - start) for row, start in zip(rejected, starts)])
some = Dataset.from_list([{"prompt": "a b", "chosen": " c", "rejected": " d"}] * 4)
model = load()
trainer = DPOTrainer(model=model, ref_model=load(0.5), args=DPOConfig(**COMMON, disable_dropout=True), train_dataset=some,
                     processing_class=tokenizer)
inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": answers}
record("other_reference", model.eval(), trainer._compute_loss(trainer.model, inputs, False))
labels = ids.masked_fill(answers == 0, -100)
sides = {}
for side, part in [("chosen", slice(0, 4)), ("rejected", slice(4, None))]:
    sides |= {f"{side}_input_ids": ids[part], f"{side}_attention_mask": attention[part], f"{side}_labels": labels[part]}
sides |= {"prompt_input_ids": ids[:4, :1], "prompt_attention_mask": attention[:4, :1]}
model = load()
trainer = CPOTrainer(model=model, args=CPOConfig(**COMMON, disable_dropout=True, beta=0.1), train_dataset=some,
                     processing_class=tokenizer)
record("cpo", model.eval(), trainer.get_batch_loss_metrics(trainer.model, sides)[0])

# Judged steps: the label of a step is that of the separator behind it.
model = AutoModelForTokenClassification.from_pretrained(
    HERE / "reward_model", num_labels=2, dtype=torch.float32, attn_implementation="eager", ignore_mismatched_sizes=True
).eval()
head = load_file(HERE / "reward_model/model.safetensors")["score.weight"]
with torch.no_grad():
    model.score.weight.copy_(torch.cat([-head, head]))
    model.score.bias.zero_()
rows, classes = [], []
for prompt, steps, verdicts in STEPS:
    row = [1] + plain(prompt)
    of_row = [-100] * len(row)
    for step, verdict in zip(steps, verdicts):
        row += plain(step) + plain("\n")
        of_row += [-100] * len(step) + [int(verdict)]
    rows.append(row)
    classes.append(of_row)
made = model(input_ids=padded(rows), attention_mask=padded([[1] * len(row) for row in rows]), labels=padded(classes, -100))
record("process", model, made.loss)

# Distillation: α T² KL(p ‖ q) + (1 − α) CE over the tokens of answers.
student, teacher = load(), load(0.5)
inputs = dict(input_ids=padded(whole)[:, :-1], attention_mask=padded(present)[:, 1:])
counted, targets = padded(masks)[:, 1:] == 1, padded(whole)[:, 1:]
own, other = student(**inputs).logits[counted], teacher(**inputs).logits[counted].detach()
alpha, temperature = 0.6, 2.0
soft = F.kl_div(F.log_softmax(own / temperature, -1), F.log_softmax(other / temperature, -1), reduction="none", log_target=True)
hard = F.cross_entropy(own, targets[counted])
record("distilled", student, alpha * temperature**2 * soft.sum(-1).mean() + (1 - alpha) * hard)

(HERE / "first_losses.json").write_text(
    json.dumps({"rows": ROWS, "steps": STEPS, "results": results}, indent=1, ensure_ascii=False) + "\n"
)
