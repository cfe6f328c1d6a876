"""guidellm: a few requests one after the other, none failed; the third argument is the folder of the tokenizer."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")),
        "run",
        f"--backend=kind=openai_http,target={url.removesuffix('/v1')},model={model}",
        f"--tokenizer=kind=huggingface_auto,model={tokenizer}",
        "--profile=kind=synchronous",
        "--constraint=kind=max_requests,count=4",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--output=kind=json,path={report}",
        "--disable-console",
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
requests = benchmark["requests"]
assert len(requests["successful"]) == 4 and not requests["errored"], requests
print("4 requests, no failure", flush=True)
