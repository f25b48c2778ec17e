"""guidellm or aiperf, as they are published, against a running server.

Arguments: `guidellm` or `aiperf`, a file with the server's URL, the model's directory, a directory for reports.
"""

import json
import os
import pathlib
import subprocess
import sys

PROGRAM, URL_FILE, MODEL, WORK = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
URL = URL_FILE.read_text().strip()
NAME = MODEL.name
REQUESTS, PROMPT, ANSWER = 20, 48, 16
ENVIRONMENT = {**os.environ, "HF_HOME": str(WORK / "hub"), "CUDA_VISIBLE_DEVICES": ""}
if PROGRAM == "guidellm":
    # aiperf takes the path of a tokenizer for the name of a repository when it is told to stay offline.
    ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(*arguments):
    program = pathlib.Path(sys.executable).with_name(PROGRAM)
    found = subprocess.run([program, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, (arguments, found.stdout[-3000:], found.stderr[-3000:])


def guidellm():
    found = {}
    profiles = {"concurrent": "kind=concurrent,streams=4", "poisson": "kind=poisson,rate=20"}
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        for name, profile in profiles.items():
            report = WORK / f"{name}{route.replace('/', '-')}.json"
            run("run", "--backend", f"kind=openai_http,target={URL},model={NAME},request_format={route}",
                "--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}",
                "--tokenizer", f"kind=hf_auto,model={MODEL}",
                "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
                "--output", f"kind=json,path={report}", "--disable-console-interactive")
            metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
            totals = metrics["request_totals"]
            assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, (route, name, totals)
            # The server counts the tokens.
            assert metrics["output_token_count"]["successful"]["mean"] == ANSWER, (route, name, metrics["output_token_count"])
            found[f"{route} {name}"] = totals["successful"]
    return found


def aiperf():
    found = {}
    for kind, extra in (
        ("chat", ["--per-chunk-usage"]),
        ("completions", []),
        ("responses", []),
        ("messages", []),
    ):
        for streams in (True, False):
            work = WORK / f"{kind}-{streams}"
            options = ["--streaming", *extra] if streams else []
            run("profile", "-m", NAME, "--url", URL, "--endpoint-type", kind, "--tokenizer", MODEL, "--use-server-token-count",
                "--request-count", REQUESTS, "--concurrency", 4, "--isl", PROMPT, "--osl", ANSWER,
                "--output-artifact-dir", work, "--ui", "none", *options)
            report = json.loads((work / "profile_export_aiperf.json").read_text())
            assert report["error_summary"] == [] and report["is_complete"], (kind, streams, report["error_summary"])
            assert report["completed_request_count"]["avg"] == REQUESTS, (kind, streams, report["completed_request_count"])
            # It reads the metrics of the server, too.
            metrics = json.loads((work / "server_metrics_export.json").read_text())["metrics"]
            assert "vllm:generation_tokens" in metrics and "vllm:time_to_first_token_seconds" in metrics, list(metrics)
            found[f"{kind} {'streamed' if streams else 'whole'}"] = report["request_count"]["avg"]
    return found


print(json.dumps({"guidellm": guidellm, "aiperf": aiperf}[PROGRAM]()))
