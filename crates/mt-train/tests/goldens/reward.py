"""Writes reward.safetensors: losses of reward models and their gradients.

Needs torch, transformers 5.23, TRL 1.16, datasets and safetensors. The losses of single heads are those of TRL's
RewardTrainer, on one batch of a small Llama with random weights. The loss of an ensemble, which TRL lacks, is the mean over
the heads of the paper's formula, in float64. That of steps is what transformers computes for classes of tokens: TRL 1.16
has no PRMTrainer, and the one of earlier versions leaves the loss to transformers.
"""

import pathlib
import tempfile

import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification, PreTrainedTokenizerFast,
)
from trl import RewardConfig, RewardTrainer

ROWS, LENGTH, VOCAB = 6, 13, 40
# Tokens of the chosen and of the rejected answer with their prompt, in each pair.
SIZES = [(8, 5), (7, 13), (10, 5), (11, 12), (4, 13), (3, 9)]
# The tokens that end the steps of an answer, with their labels.
STEPS = [{2: 1, 5: 0}, {6: 1}, {1: 0, 4: 1, 9: 0}, {3: 1, 10: 1}, {2: 0, 3: 0}, {0: 1, 1: 1, 2: 0}]
MARGINS = [0.5, 0.0, 1.25, -0.75, 2.0, 0.1]

torch.manual_seed(19)
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
)
tensors = {}


def made(of, name, labels):
    model = of(LlamaConfig(**SHAPE, num_labels=labels, classifier_dropout=0.0)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + ("norm" in parameter_name))
            tensors[f"{name}.{parameter_name}"] = parameter.detach().clone()
    return model


def padded(rows, width=LENGTH):
    return torch.stack([F.pad(torch.as_tensor(row), (0, width - len(row))) for row in rows])


chosen = [torch.randint(3, VOCAB, (size,)) for size, _ in SIZES]
rejected = [torch.randint(3, VOCAB, (size,)) for _, size in SIZES]
for name, rows in [("chosen", chosen), ("rejected", rejected)]:
    tensors[f"{name}.inputs"] = padded(rows)
    tensors[f"{name}.segments"] = padded([torch.ones_like(row) for row in rows])
    tensors[f"{name}.counted"] = padded([F.pad(torch.ones(1, dtype=torch.long), (len(row) - 1, 0)) for row in rows])
    tensors[f"{name}.targets"] = torch.zeros(ROWS, LENGTH, dtype=torch.long)
tensors["margins"] = torch.tensor(MARGINS)
tensors["no_margins"] = torch.zeros(ROWS)
ids, attention = padded(chosen + rejected), torch.cat([tensors["chosen.segments"], tensors["rejected.segments"]])


def record(name, model, loss):
    model.zero_grad()
    loss.backward()
    tensors[f"{name}.loss"] = loss.detach().float().reshape(1)
    for parameter, value in model.named_parameters():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        tensors[f"{name}.{parameter}"] = gradient.float().clone()
    print(f"{name:20} {loss.item():.7f}")


words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="w3"
)
pairs = Dataset.from_list([{"chosen": "w4 w6", "rejected": "w4 w7"}] * ROWS)
single = made(LlamaForSequenceClassification, "policy", 1)
for name, margins, coefficient in [("pairs", None, None), ("margin", MARGINS, None), ("centered", None, 0.3)]:
    arguments = RewardConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], per_device_train_batch_size=ROWS, use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_dropout=True, max_length=64, center_rewards_coefficient=coefficient,
    )
    trainer = RewardTrainer(model=single, args=arguments, train_dataset=pairs, processing_class=tokenizer)
    single.eval()
    inputs = {"input_ids": ids, "attention_mask": attention}
    if margins:
        inputs["margin"] = torch.tensor(margins)
    record(name, single, trainer.compute_loss(trainer.model, inputs))
    if name == "pairs":
        for metric in ["accuracy", "margin"]:
            tensors[f"metric.{metric}"] = torch.tensor(trainer._metrics["eval"][metric][-1:])

heads = made(LlamaForSequenceClassification, "ensemble_policy", 3).double()
scores = heads(input_ids=ids, attention_mask=attention, use_cache=False).logits
difference = scores[:ROWS] - scores[ROWS:] - torch.tensor(MARGINS, dtype=torch.float64)[:, None]
record("ensemble", heads, -F.logsigmoid(difference).mean())
deviation = scores.std(dim=1, correction=0)
tensors["metric.deviation"] = deviation.mean().detach().float().reshape(1)

steps = made(LlamaForTokenClassification, "steps_policy", 2)
labels = torch.full((ROWS, LENGTH), -100)
for row, ends in enumerate(STEPS):
    for place, label in ends.items():
        labels[row, place] = label
tensors["steps.counted"] = (labels >= 0).long()
tensors["steps.targets"] = labels.clamp(min=0)
record("steps", steps, steps(input_ids=ids[:ROWS], attention_mask=attention[:ROWS], labels=labels, use_cache=False).loss)

save_file({name: value.contiguous() for name, value in tensors.items()},
          pathlib.Path(__file__).with_name("reward.safetensors"))
