"""Hugging Face's own library at a hub: hub_client.py upload|download DIRECTORY, with HF_ENDPOINT and HF_TOKEN set."""

import os
import pathlib
import shutil
import sys

os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from huggingface_hub import HfApi, snapshot_download

task, directory = sys.argv[1], pathlib.Path(sys.argv[2])
if task == "upload":
    api = HfApi()
    api.create_repo("owner/theirs", private=True)
    api.upload_folder(repo_id="owner/theirs", folder_path=directory, commit_message="Add the model")
else:
    found = snapshot_download("owner/ours", cache_dir=directory / "cache")
    shutil.copytree(found, directory / "ours", ignore=shutil.ignore_patterns(".gitattributes"))
