"""Writes keys.json and models.json from descriptions of MaxText's configuration.

usage: make.py DIRECTORY

DIRECTORY holds, as JSON, MaxText's schema (`config_keys.json`: groups of keys with types and defaults as Python
source, and enumerations), the defaults of its base.yml (`base_defaults.json`) and its named models (`models.json`).
"""

import ast
import json
import pathlib
import sys

source, target = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
schema = json.loads((source / "config_keys.json").read_text())
base = json.loads((source / "base_defaults.json").read_text())
enumerated = {
    f"{name}.{variant}": ast.literal_eval(value)
    for name, variants in schema["enums"].items()
    for variant, value in variants
}
# Enumerations whose members the schema does not list.
enumerated |= {"ReorderStrategy.AUTO": "auto", "CustomRule.DEFAULT": ""}


def value(key):
    text = key["default"]
    if text in enumerated:
        return enumerated[text]
    if text == "<factory>":
        return {} if "dict" in key["type"] else []
    return ast.literal_eval(text)


keys = {}
for group in schema["groups"]:
    for key in group["fields"]:
        row = {"group": group["group"], "default": value(key)}
        if key["key"] in base["defaults"]:
            stated = base["defaults"][key["key"]]
            row["base"] = None if stated == "None" else stated
        keys[key["key"]] = row
keys["logical_axis_rules"]["base"] = base["logical_axis_rules"]


def write(name, rows):
    lines = [f"{json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in rows.items()]
    (target / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


write("keys.json", keys)
write("models.json", json.loads((source / "models.json").read_text()))
