"""Writes distillation.safetensors and distillation_features.safetensors: losses of distillation and their gradients for the student.

Needs torch, transformers 5.23, TRL 1.16 and safetensors. Two small Llamas with random weights, of which the teacher is wider and
deeper, are applied to one batch in float64. The generalized Jensen-Shannon divergence is TRL's own function; the mixture with a
temperature and losses of features are written out.
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.gkd import GKDTrainer

ROWS, LENGTH, VOCAB = 6, 13, 40
# Tokens of each row, and the first of its targets with a loss.
SIZES = [(8, 3), (7, 0), (13, 4), (11, 7), (3, 1), (9, 8)]

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)


def model(width, middle, layers, heads, scale):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=1, head_dim=4, rms_norm_eps=1e-5, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager", tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Stored numbers are exact in float32.
            values = torch.randn_like(parameter) * scale + ("norm" in name)
            parameter.copy_(values.float().double())
    return made.eval()


students = {"student": model(8, 12, 1, 2, 0.4), "deep": model(8, 12, 2, 2, 0.4)}
teacher = model(12, 20, 3, 4, 0.5)
same = model(8, 20, 3, 4, 0.5)
tensors = {}
for name, made in [*students.items(), ("teacher", teacher), ("same", same)]:
    tensors |= {f"{name}.{n}": p.detach().float().clone() for n, p in made.named_parameters()}

tokens = torch.randint(3, VOCAB, (ROWS, LENGTH + 1))
places = torch.arange(LENGTH)
present = torch.stack([places < size for size, _ in SIZES]).long()
counted = torch.stack([(places >= first) & (places < size) for size, first in SIZES])
inputs, targets = tokens[:, :-1] * present, tokens[:, 1:]
tensors |= {"inputs": inputs, "targets": targets, "segments": present, "counted": counted.long()}
tensors = {name: value.to(torch.int32) if value.dtype == torch.int64 else value for name, value in tensors.items()}


def logits(made):
    return made(input_ids=inputs, attention_mask=present).logits


def record(name, student, loss):
    student.zero_grad()
    loss.backward()
    tensors[f"{name}.loss"] = loss.detach().float().reshape(1)
    for parameter, value in student.named_parameters():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        tensors[f"{name}.{parameter}"] = gradient.float().clone()
    print(f"{name:28} {loss.item():.6f}")


def terms(student, temperature):
    own, other = logits(student)[counted], logits(teacher)[counted].detach()
    soft = F.kl_div(
        F.log_softmax(own / temperature, -1), F.log_softmax(other / temperature, -1), reduction="none", log_target=True
    ).sum(-1).mean()
    return F.cross_entropy(own, targets[counted]), soft


def mixture(name, alpha, temperature):
    student = students["student"]
    hard, soft = terms(student, temperature)
    record(name, student, (1 - alpha) * hard + alpha * temperature**2 * soft)
    tensors[f"{name}.hard"] = hard.detach().float().reshape(1)
    tensors[f"{name}.divergence"] = soft.detach().float().reshape(1)
    teacher_loss = F.cross_entropy(logits(teacher)[counted], targets[counted])
    tensors[f"{name}.teacher"] = teacher_loss.detach().float().reshape(1)


mixture("mixture", 0.5, 1.0)
mixture("warm", 0.7, 2.5)
mixture("soft", 1.0, 0.6)
# A linear and a cosine schedule in the third of five steps, then in the last.
mixture("midway", 0.2 + 0.5 * (0.8 - 0.2), 1.0 + (3.0 - 1.0) * 0.5)
mixture("last", 0.8, 1.0)


def jsd(name, beta, temperature, alpha=1.0):
    student = students["student"]
    # Tokens that are masked must not matter, whatever their logits.
    labels = torch.where(counted, targets, -100)
    loss = GKDTrainer.generalized_jsd_loss(
        logits(student), logits(teacher).detach(), labels, beta=beta, temperature=temperature
    )
    hard = F.cross_entropy(logits(student)[counted], targets[counted])
    record(name, student, alpha * loss + (1 - alpha) * hard)


for beta in [0.0, 0.1, 0.5, 0.9, 1.0]:
    jsd(f"jsd_{beta}", beta, 1.0)
jsd("jsd_warm", 0.3, 1.7)
jsd("jsd_mixed", 0.5, 1.3, alpha=0.6)


def attended(made):
    """The outputs of the attention of each layer, before they are added to the residual stream."""
    kept = []
    hooks = [layer.self_attn.register_forward_hook(lambda _, __, out: kept.append(out[0])) for layer in made.model.layers]
    out = logits(made)
    for hook in hooks:
        hook.remove()
    return out, kept


def features(name, student, layers, kind, alpha, weight):
    student = students[student]
    own_logits, own = attended(student)
    other_logits, other = attended(same)
    losses = []
    for mine, theirs in layers:
        a, b = own[mine][counted], other[theirs][counted].detach()
        losses.append((1 - F.cosine_similarity(a, b, dim=-1)).mean() if kind == "cosine" else ((a - b) ** 2).mean())
    a, b = own_logits[counted], other_logits[counted].detach()
    soft = F.kl_div(F.log_softmax(a, -1), F.log_softmax(b, -1), reduction="none", log_target=True).sum(-1).mean()
    hard = F.cross_entropy(a, targets[counted])
    feature = torch.stack(losses).mean()
    record(name, student, (1 - alpha) * hard + alpha * soft + weight * feature)
    tensors[f"{name}.feature"] = feature.detach().float().reshape(1)


features("cosine", "deep", [(0, 0), (1, 1)], "cosine", 0.5, 0.8)
features("l2", "deep", [(0, 0), (1, 1)], "l2", 0.5, 0.8)
features("cosine_shallow", "student", [(0, 2)], "cosine", 0.4, 1.5)
features("l2_crossed", "deep", [(1, 0), (0, 2)], "l2", 0.4, 1.5)


def top_k(name, k, temperature, alpha, beta=None):
    student = students["student"]
    values, indices = logits(teacher).detach().topk(k, -1)
    own = logits(student).gather(-1, indices)
    if beta is None:
        soft = temperature**2 * F.kl_div(
            F.log_softmax(own[counted] / temperature, -1), F.log_softmax(values[counted] / temperature, -1),
            reduction="none", log_target=True,
        ).sum(-1).mean()
    else:
        labels = torch.where(counted, targets, -100)
        soft = GKDTrainer.generalized_jsd_loss(own, values, labels, beta=beta, temperature=temperature)
    hard = F.cross_entropy(logits(student)[counted], targets[counted])
    record(name, student, (1 - alpha) * hard + alpha * soft)
    tensors[f"{name}.logits"] = values.float()
    tensors[f"{name}.indices"] = indices.to(torch.int32)


top_k("top_4", 4, 1.6, 0.7)
top_k("top_6_jsd", 6, 1.3, 0.6, beta=0.3)


def write(name, chosen):
    path = pathlib.Path(__file__).parent / f"{name}.safetensors"
    save_file({name: value.contiguous() for name, value in chosen.items()}, path)


# The losses of features have a teacher of their own.
FEATURES = ("cosine", "l2", "same.", "deep.")
BOTH = ("student.", "inputs", "targets", "segments", "counted")
write("distillation", {n: v for n, v in tensors.items() if not n.startswith(FEATURES)})
write("distillation_features",
      {n.replace("same.", "teacher.", 1): v for n, v in tensors.items() if n.startswith(FEATURES + BOTH)})
