"""lm-eval's `local-completions` and `local-chat-completions` against a server, and its `hf` model on the same weights.

Arguments: a file with the server's URL, the model's directory, a directory for tasks and results.
"""

import json
import os
import pathlib
import sys

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
URL = pathlib.Path(sys.argv[1]).read_text().strip()
MODEL, WORK = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
os.environ["HF_HOME"] = str(WORK / "hub")

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

NAME = os.environ.get("SERVED_NAME", MODEL.name)
ANIMALS = ["dog", "bird", "cat", "frog", "horse", "cow", "owl", "duck"]
VERBS = ["barks", "sings", "runs", "swims", "sleeps", "begins"]

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
"""
GENERATION = """
task: local_generation
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: generate_until
test_split: test
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n", "Question"]
  do_sample: false
  temperature: 0.0
  max_gen_toks: 24
metric_list:
  - metric: exact_match
metadata:
  version: 1.0
"""


def write_tasks():
    lines = []
    for index in range(24):
        animal, verb = ANIMALS[index % len(ANIMALS)], VERBS[index % len(VERBS)]
        choices = [f" a {ANIMALS[(index + step) % len(ANIMALS)]}{'.' * step}" for step in range(4)]
        # The length of the question varies.
        question = f"which animal {verb}? " * (1 + index % 5)
        lines.append(json.dumps({"question": question, "choices": choices, "label": index % 4, "answer": animal}))
    data = WORK / "questions.jsonl"
    data.write_text("\n".join(lines) + "\n")
    tasks = WORK / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "choice.yaml").write_text(CHOICE.format(data=data))
    (tasks / "generation.yaml").write_text(GENERATION.format(data=data))
    return TaskManager(include_path=str(tasks), include_defaults=False)


def evaluate(model, arguments, tasks, manager, **options):
    # One request of `hf` at a time: padding changes the sums of attention.
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0,
        batch_size=1, **options)
    return {task: (found["results"][task], found["samples"][task]) for task in tasks}


def compare(name, expected, found):
    """Checks that the samples and the results of a task are the same; returns the largest difference of scores."""
    worst = 0.0
    assert len(expected[1]) == len(found[1]) == 24
    for ours, theirs in zip(
        sorted(found[1], key=lambda sample: sample["doc_id"]), sorted(expected[1], key=lambda sample: sample["doc_id"])
    ):
        assert ours["arguments"] == theirs["arguments"] or name == "chat", (ours["arguments"], theirs["arguments"])
        if ours["filtered_resps"] and isinstance(ours["filtered_resps"][0], str):
            assert ours["filtered_resps"] == theirs["filtered_resps"], (name, ours["filtered_resps"], theirs["filtered_resps"])
            continue
        for (our_score, our_greedy), (their_score, their_greedy) in zip(ours["filtered_resps"], theirs["filtered_resps"]):
            worst = max(worst, abs(float(our_score) - float(their_score)))
            assert str(our_greedy) == str(their_greedy), (ours["doc_id"], our_greedy, their_greedy)
    metrics = lambda results: {key: value for key, value in results.items() if isinstance(value, float)}
    assert metrics(expected[0]) == metrics(found[0]), (name, expected[0], found[0])
    assert worst < 1e-4, (name, worst)
    return worst


manager = write_tasks()
both = ["local_choice", "local_generation"]
direct = evaluate("hf", f"pretrained={MODEL},dtype=float32,device=cpu", both, manager)
common = f"model={NAME},tokenizer={MODEL},tokenizer_backend=huggingface,num_concurrent=4,max_retries=1,timeout=120"
report = {}
for tokenized in (True, False):
    served = evaluate(
        "local-completions",
        f"{common},base_url={URL}/v1/completions,tokenized_requests={tokenized},max_length=512", both, manager)
    for task in both:
        report[f"{task}, tokenized={tokenized}"] = compare(task, direct[task], served[task])
generation = both[1:]
direct = evaluate("hf", f"pretrained={MODEL},dtype=float32,device=cpu", generation, manager, apply_chat_template=True)
served = evaluate(
    "local-chat-completions", f"{common},base_url={URL}/v1/chat/completions", generation, manager, apply_chat_template=True)
report["chat"] = compare("chat", direct[generation[0]], served[generation[0]])
texts = [sample["filtered_resps"][0] for sample in served[generation[0]][1]]
report["texts"] = len(set(texts))
print(json.dumps(report))
