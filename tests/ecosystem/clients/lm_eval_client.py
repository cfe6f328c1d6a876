"""lm-eval: a task of log likelihoods, and one that generates; the third argument is the folder of the tokenizer.

Writes the log likelihoods to the file of the fourth argument, for the test to compare.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model, tokenizer, answers = sys.argv[1:]
DOCUMENTS = [
    {"text": "The capital of France is", "choices": [" Paris", " Berlin", " a banana"], "label": 0},
    {"text": "One, two, three,", "choices": [" four", " nine", " blue"], "label": 0},
    {"text": "Water freezes at zero", "choices": [" degrees Celsius", " of the", " cats"], "label": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
output_type: {kind}
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\nmetric_list: [{metric: acc}]'
UNTIL = (
    'doc_to_target: "{{choices[0]}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false, temperature: 0.0}'
)
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.json"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for name, kind, more in (("choices", "multiple_choice", CHOICES), ("until", "generate_until", UNTIL)):
        (Path(folder) / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, more=more))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_length": 2048,
        },
        tasks=["choices", "until"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
likelihoods = [
    {"context": arguments[0], "continuation": arguments[1], "logprob": float(response[0][0]), "greedy": response[0][1]}
    for sample in found["samples"]["choices"]
    for arguments, response in zip(sample["arguments"], sample["resps"], strict=True)
]
assert len(likelihoods) == 9
Path(answers).write_text(json.dumps(likelihoods))
print("a task of log likelihoods", flush=True)
assert all(sample["resps"][0][0] for sample in found["samples"]["until"])
print("generate_until", flush=True)
