"""Judges answers by functions of the user: one JSON object a line, in and out.

The first line names the file and its functions, each further one holds an answer and the name of a function. Replies are
`{"reward": …}`, whose value is null where the function does not apply, or `{"error": …}`. What functions print goes to
standard error, so that it cannot be taken for a reply.
"""

import importlib.util
import inspect
import json
import math
import os
import sys
import traceback

replies = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
os.dup2(2, 1)


def reply(value):
    replies.write(json.dumps(value, allow_nan=False) + "\n")
    replies.flush()


def description(error, path):
    """The exception, with the last line of the user's own code that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ("<string>", "")]
    own = [f for f in frames if f.filename == path] or frames
    if own and not own[-1].filename.startswith("<frozen"):
        text += f" ({own[-1].filename}, line {own[-1].lineno})"
    return text


def imported(path, names):
    """The functions, with the names of their arguments, or None if they take any."""
    spec = importlib.util.spec_from_file_location("reward_functions", path)
    if spec is None:
        raise ValueError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_functions"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    functions = {}
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            raise ValueError(f"it has no function `{name}`")
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        functions[name] = function, None if takes_any else set(parameters)
    return functions


def reward(function, accepted, request):
    """The reward by a function that takes lists, here of one element."""
    arguments = {name: [value] for name, value in request["columns"].items()}
    arguments |= {"prompts": [request["prompt"]], "completions": [request["completion"]]}
    if request["answer"] is not None:
        arguments["answer"] = [request["answer"]]
    if accepted is not None:
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    result = function(**arguments)
    if not isinstance(result, (int, float)):
        result = list(result)
        if len(result) != 1:
            raise ValueError(f"it returned {len(result)} rewards for one answer")
        result = result[0]
    if result is None:
        return None
    result = float(result)
    if not math.isfinite(result):
        raise ValueError(f"it returned {result}")
    return result


request = json.loads(sys.stdin.readline())
path = request["path"]
try:
    functions = imported(path, request["functions"])
except (Exception, SystemExit) as error:
    reply({"error": description(error, path)})
    sys.exit(0)
reply({"reward": None})

for line in sys.stdin:
    request = json.loads(line)
    try:
        reply({"reward": reward(*functions[request["function"]], request)})
    except (Exception, SystemExit) as error:
        reply({"error": description(error, path)})
