"""Writes preference.json: losses and gradient norms of first steps on preference data, as TRL's trainers compute them.

Needs torch, transformers 5.23, TRL 1.16 and datasets. The model is `llama_six_on_two` of the tests of mt-models; each
character is a token, between BOS and EOS. The reference model is the model itself.
"""

import json

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from first_steps import COMMON, HERE, ROWS, load, padded, plain, record, results, tokenizer

COMMON = dict(COMMON, disable_dropout=True)
LABELS = [True, False, True, False]


def encode(text, ends=True):
    return [1] + plain(text) + ([2] if ends else [])


def batch(prompts, answers):
    whole = [encode(prompt + answer) for prompt, answer in zip(prompts, answers)]
    starts = [len(encode(prompt, ends=False)) for prompt in prompts]
    ids = padded(whole)
    attention = padded([[1] * len(row) for row in whole])
    answer = padded([[0] * start + [1] * (len(row) - start) for row, start in zip(whole, starts)])
    return ids, attention, answer


some_pairs = Dataset.from_list([{"prompt": "a b", "chosen": " c", "rejected": " d"}] * 4)
some_judged = Dataset.from_list([{"prompt": "a b", "completion": " c", "label": True}] * 4)

prompts = [prompt for prompt, _, _ in ROWS]
chosen = [answer for _, answer, _ in ROWS]
ids, attention, answers = batch(prompts * 2, chosen + [answer for _, _, answer in ROWS])
for name in ["sigmoid", "ipo", "sppo_hard"]:
    model = load()
    arguments = DPOConfig(**COMMON, loss_type=[name])
    trainer = DPOTrainer(model=model, ref_model=load(), args=arguments, train_dataset=some_pairs,
                         processing_class=tokenizer)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": answers}
    record(name, model.eval(), trainer._compute_loss(trainer.model, inputs, False))

labels = ids.masked_fill(answers == 0, -100)
sides = {}
for side, part in [("chosen", slice(0, 4)), ("rejected", slice(4, None))]:
    sides |= {f"{side}_input_ids": ids[part], f"{side}_attention_mask": attention[part], f"{side}_labels": labels[part]}
sides |= {"prompt_input_ids": ids[:4, :1], "prompt_attention_mask": attention[:4, :1]}
for name, trainer_type, config in [
    ("orpo", ORPOTrainer, ORPOConfig(**COMMON, beta=0.1)),
    ("simpo", CPOTrainer, CPOConfig(**COMMON, beta=0.1, loss_type="simpo", cpo_alpha=0.0)),
]:
    model = load()
    trainer = trainer_type(model=model, args=config, train_dataset=some_pairs, processing_class=tokenizer)
    record(name, model.eval(), trainer.get_batch_loss_metrics(trainer.model, sides)[0])

model = load()
trainer = KTOTrainer(model=model, ref_model=load(), args=KTOConfig(**COMMON, undesirable_weight=0.7),
                     train_dataset=some_judged, processing_class=tokenizer)
own, other = batch(prompts, chosen), batch(prompts, chosen[-1:] + chosen[:-1])
inputs = {"label": torch.tensor(LABELS)}
for prefix, part in [("", own), ("KL_", other)]:
    inputs |= {f"{prefix}input_ids": part[0], f"{prefix}attention_mask": part[1], f"{prefix}completion_mask": part[2]}
record("kto", model.eval(), trainer._compute_loss(trainer.model, inputs, False))

(HERE / "preference.json").write_text(json.dumps({"pairs": ROWS, "labels": LABELS, "results": results}, indent=1) + "\n")
