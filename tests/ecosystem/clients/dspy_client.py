"""dspy: a signature with typed outputs."""

import sys
from typing import Literal

import dspy

url, model = sys.argv[1:]
lm = dspy.LM(
    f"openai/{model}", api_base=url, api_key="none", max_tokens=200, temperature=0.0, cache=False, num_retries=0
)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Judge(dspy.Signature):
    """Judges the mood of a sentence."""

    sentence: str = dspy.InputField()
    mood: Literal["good", "bad"] = dspy.OutputField()


assert dspy.Predict(Judge)(sentence="What a lovely day!").mood in ("good", "bad")
print("a signature through JSONAdapter", flush=True)
assert lm("Hello")
print("a plain call", flush=True)
