"""Continues a prompt with llama.cpp by greedy decoding, or only reads one. Usage: llama_decode.py JOB, see job.py."""

import time

import gguf
import llama_cpp
import numpy as np

import job
import model

asked = job.read()
variant = asked["variant"]
PREFILL = asked["row"] == "prefill"


def opened():
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = variant["weights"] == "mapped"
    weights = llama_cpp.llama_model_load_from_file(asked["weights"].encode(), parameters)
    settings = llama_cpp.llama_context_default_params()
    if PREFILL:
        settings.n_ctx = settings.n_batch = model.LENGTH
        settings.n_ubatch = variant["batch"]
    else:
        settings.n_ctx = model.PROMPT + model.GENERATED
    settings.n_threads = settings.n_threads_batch = asked["threads"]
    kinds = {"fused": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, "plain": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}
    settings.flash_attn_type = kinds[variant["attention"]]
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    settings.type_k = settings.type_v = gguf.GGMLQuantizationType[kinds[variant["cache"]]].value
    context = llama_cpp.llama_init_from_model(weights, settings)
    assert context, "the context cannot be made"
    return weights, context


def clear(context):
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)


def after(context, tokens):
    """The most probable next token. Only the logits of the last one are computed."""
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
    scores = llama_cpp.llama_get_logits_ith(context, -1)
    return int(np.ctypeslib.as_array(scores, (model.VOCAB,)).argmax())


def generate(context, prompt):
    for number in range(asked["steps"]):
        clear(context)
        tokens = [after(context, prompt)]
        start = time.perf_counter()
        while len(tokens) < model.GENERATED:
            tokens.append(after(context, tokens[-1:]))
        job.tell(step=number, tokens=tokens, seconds=(time.perf_counter() - start) / (model.GENERATED - 1))


def main():
    weights, context = opened()
    row = np.load(asked["tokens"])[0].tolist()
    if PREFILL:
        job.prefills(asked, lambda: clear(context), lambda _: after(context, row[: model.LENGTH]))
    else:
        generate(context, row[: model.PROMPT])
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(weights)


main()
