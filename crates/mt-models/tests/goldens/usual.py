"""Writes usual.json beside this script: for every dense family a `config.json` with sizes only, and the same file after
transformers has added its defaults for keys that published files may leave out.

    pip install transformers==5.23.0
    python usual.py
"""

import json
import pathlib

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
)

SIZES = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=7)
# Published files of these families leave out the numbers of heads.
WITHOUT_HEADS = [Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, GemmaConfig]
WITH_HEADS = [LlamaConfig, MistralConfig, Olmo3Config, Qwen2Config, Qwen3Config]

usual = {}
for configs, sizes in [(WITHOUT_HEADS, SIZES), (WITH_HEADS, SIZES | dict(num_attention_heads=8, vocab_size=300))]:
    for config in configs:
        minimal = dict(model_type=config.model_type, **sizes)
        whole = json.loads(config(**sizes).to_json_string(use_diff=False))
        usual[config.model_type] = dict(minimal=minimal, whole=whole)
path = pathlib.Path(__file__).with_name("usual.json")
path.write_text(json.dumps(usual, indent=1, sort_keys=True) + "\n")
