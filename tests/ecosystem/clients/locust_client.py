"""locust: eight users of chat completions for five seconds, no failure."""

import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
BODY = f"""
from locust import HttpUser, task

class Person(HttpUser):
    @task
    def ask(self):
        body = {{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 4}}
        self.client.post("/v1/chat/completions", json=body)
"""
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "locustfile.py"
    file.write_text(BODY)
    options = ["--headless", "-u", "8", "-r", "8", "-t", "5s", "--host", url.removesuffix("/v1"), "--only-summary"]
    subprocess.run([sys.executable, "-m", "locust", "-f", str(file), *options], check=True)
print("8 users, no failure", flush=True)
