"""Answers several requests at once with llama.cpp's parallel sequences, as its own batched benchmark does: all prompts in one
batch, then one token of each sequence at a time. Usage: llama_serve.py JOB, see job.py.

Like that benchmark it does not choose tokens, except the first one after a long prompt.
"""

import time

import gguf
import llama_cpp
import numpy as np

import job
import model

asked = job.read()
variant = asked["variant"]


class Context:
    """A context for some sequences."""

    def __init__(self, weights, sequences, tokens):
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = sequences * tokens
        settings.n_seq_max = sequences
        settings.n_batch = 4096
        settings.n_ubatch = variant["batch"]
        settings.kv_unified = variant["cells"] == "shared"
        settings.n_threads = settings.n_threads_batch = min(variant["threads"], asked["threads"])
        kinds = {"fused": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, "plain": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}
        settings.flash_attn_type = kinds[variant["attention"]]
        kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
        settings.type_k = settings.type_v = gguf.GGMLQuantizationType[kinds[variant["cache"]]].value
        self.context = llama_cpp.llama_init_from_model(weights, settings)
        assert self.context, "the context cannot be made"
        self.batch = llama_cpp.llama_batch_init(4096, 0, 1)

    def decode(self, entries):
        """Reads tokens, given with their positions, their sequences and whether logits are wanted."""
        for first in range(0, len(entries), 4096):
            part = entries[first : first + 4096]
            for place, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[place] = token
                self.batch.pos[place] = position
                self.batch.n_seq_id[place] = 1
                self.batch.seq_id[place][0] = sequence
                self.batch.logits[place] = wanted
            self.batch.n_tokens = len(part)
            assert llama_cpp.llama_decode(self.context, self.batch) == 0, "llama.cpp finds no room for a batch"
        llama_cpp.llama_synchronize(self.context)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def answered(context, prompts, length):
    """The seconds for answers of `length` tokens."""
    context.clear()
    entries = [
        (token, position, sequence, position + 1 == len(prompt))
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    start = time.perf_counter()
    context.decode(entries)
    for step in range(length):
        context.decode([(step, len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)])
    return time.perf_counter() - start


def first_token(context, prompt):
    """The seconds until the token after a prompt is known."""
    context.clear()
    start = time.perf_counter()
    context.decode([(token, position, 0, position + 1 == len(prompt)) for position, token in enumerate(prompt)])
    scores = llama_cpp.llama_get_logits_ith(context.context, -1)
    np.ctypeslib.as_array(scores, (model.VOCAB,)).argmax()
    return time.perf_counter() - start


def main():
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = False
    weights = llama_cpp.llama_model_load_from_file(asked["weights"].encode(), parameters)
    random = np.random.default_rng(asked["seed"])

    def prompts(number, length):
        return random.integers(3, model.VOCAB, (number, length)).tolist()

    for number in asked["sequences"]:
        context = Context(weights, number, asked["prompt"] + asked["answer"])
        for _ in range(asked["repetitions"]):
            seconds = answered(context, prompts(number, asked["prompt"]), asked["answer"])
            job.tell(step=number, row=f"{number}", seconds=seconds)
        context.close()
    if asked["first"]:
        context = Context(weights, 1, asked["first"] + 64)
        for _ in range(asked["repetitions"]):
            seconds = first_token(context, prompts(1, asked["first"])[0])
            job.tell(step=0, row="first", seconds=seconds)
        context.close()
    llama_cpp.llama_model_free(weights)


main()
