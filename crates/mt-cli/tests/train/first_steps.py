"""What the programs share that write losses and gradient norms of first steps: the model, its tokens, the rows, and the
records of results.
"""

import pathlib
import string
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
MODEL = HERE / "../../../mt-models/tests/goldens/families/llama_six_on_two"
# Prompts with a right and a wrong answer.
ROWS = [
    ("What runs. ", "The loop", "A stone sings"),
    ("Who tests. ", "All", "None of them"),
    ("When. ", "In the morning", "Now"),
    ("Where to. ", "Over the river", "Home again"),
]
TOKENS = ["<pad>", "<bos>", "<eos>", "<|turn|>", "<|end|>", *string.ascii_lowercase, *string.ascii_uppercase, *" .,:\n"]
NUMBERS = {token: number for number, token in enumerate(TOKENS)}


def plain(text):
    return [NUMBERS[character] for character in text]


def padded(rows, filler=0):
    width = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def load(output_factor=1.0):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(output_factor)
    return model


tokenizer = Tokenizer(models.WordLevel(NUMBERS, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
)
COMMON = dict(output_dir=tempfile.mkdtemp(), report_to=[], per_device_train_batch_size=4, use_cpu=True, bf16=False,
              gradient_checkpointing=False, max_length=64)
results = {}


def record(name, model, loss):
    loss.backward()
    squares = sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)
    results[name] = {"loss": loss.item(), "gradient_norm": squares.sqrt().item()}
    print(name, results[name])
