"""Writes a small Llama of random weights with a tokenizer of its own.

Argument: the directory to write.
"""

import json
import pathlib
import sys

import tokenizers
import torch
import transformers

DIRECTORY = pathlib.Path(sys.argv[1])
TEXT = """All happy families are alike; each unhappy family is unhappy in its own way.
The river runs to the sea, and the sea is never full. Where does the river begin?
Question: which animal barks? Answer: a dog. Question: which animal sings? Answer: a bird.
The answer is a number between one and ten: one, two, three, four, five, six, seven, eight, nine, ten.
"""
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(TEXT.splitlines(), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>",
        chat_template=TEMPLATE, model_max_length=512,
    )


torch.manual_seed(0)
own = tokenizer()
config = transformers.LlamaConfig(
    vocab_size=len(own), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
    bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, initializer_range=0.3,
)
model = transformers.LlamaForCausalLM(config).float()
model.save_pretrained(DIRECTORY)
own.save_pretrained(DIRECTORY)
print(json.dumps({"vocab_size": len(own)}))
