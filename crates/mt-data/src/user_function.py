"""Applies a function of the user to rows: one JSON object a line, in and out.

The first line names the function, each further one holds a row. Each has one answer: `{"row": …}`, or `{"error": …}`.
What the function prints goes to standard error, so that it cannot be taken for an answer.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
import types

answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
os.dup2(2, 1)


def answer(value):
    answers.write(json.dumps(value, allow_nan=False) + "\n")
    answers.flush()


def description(error, path):
    """The exception, with the last line of the user's own code that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ("<string>", "")]
    own = [f for f in frames if path and f.filename == path] or frames
    if own and not own[-1].filename.startswith("<frozen"):
        text += f" ({own[-1].filename}, line {own[-1].lineno})"
    return text


def imported(request):
    """The function, and the file that defines it."""
    if request["kind"] == "formatting":
        module_name, _, name = request["path"].rpartition(".")
        if not module_name:
            raise ValueError("it names no module: write `module.function`")
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(module_name)
    else:
        name = "process_data"
        spec = importlib.util.spec_from_file_location("dataset_processor", request["path"])
        if spec is None:
            raise ValueError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["dataset_processor"] = module
        spec.loader.exec_module(module)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"`{name}` is no function")
    return function, getattr(module, "__file__", None)


request = json.loads(sys.stdin.readline())
try:
    function, path = imported(request)
except (Exception, SystemExit) as error:
    answer({"error": description(error, None)})
    sys.exit(0)
answer({"row": None})

for line in sys.stdin:
    row = json.loads(line)
    try:
        if request["kind"] == "formatting":
            result = function(row, **request["arguments"])
        else:
            config = types.SimpleNamespace(**request["arguments"])
            result = function(request["dataset"], None, None, config, row)
    except (Exception, SystemExit) as error:
        answer({"error": f"raised {description(error, path)}"})
        continue
    if not isinstance(result, dict):
        answer({"error": f"returned {type(result).__name__}, not a dictionary"})
        continue
    try:
        answer({"row": result})
    except (TypeError, ValueError) as error:
        answer({"error": f"returned what JSON cannot hold: {error}"})
