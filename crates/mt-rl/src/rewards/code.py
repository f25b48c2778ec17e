"""Runs code that a model has written, and then tests of it.

The first line says that the interpreter runs. The code sees an input, or, if there are tests, none. Tests follow it in the
same namespace, and the last line repeats a number that is known only with them, so that code which ends the process passes
no test.
"""

import io
import json
import sys

print("begin", flush=True)
request = json.loads(sys.stdin.readline())
given = sys.stdin
sys.stdin = io.StringIO(request["input"])
namespace = {"__name__": "__main__"}
exec(compile(request["code"], "answer.py", "exec"), namespace)
if request["has_tests"]:
    tests = json.loads(given.readline())
    exec(compile(tests["tests"], "tests.py", "exec"), namespace)
    print("\n" + tests["number"], flush=True)
