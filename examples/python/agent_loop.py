"""The loop of an agent: run the model's code, return the error to the model, run its next answer.

A fixed list replaces the model, so the program needs no model key and its output never changes.
"""

from e2b_code_interpreter import Sandbox

TASK = "the mean of the scores in scores.json"
ANSWERS = [
    # The model has not read the file and assumes a list of numbers.
    "import json\nscores = json.load(open('scores.json'))\nsum(scores) / len(scores)",
    # The model has seen the error.
    "values = [entry['score'] for entry in scores]\nsum(values) / len(values)",
]


def model(messages: list[str]) -> str:
    """A real agent calls a model here."""
    return ANSWERS[len(messages) - 1]


with Sandbox.create(timeout=300) as sandbox:
    sandbox.files.write("scores.json", '[{"name": "ann", "score": 3}, {"name": "bob", "score": 5}]')
    messages = [TASK]
    while True:
        cell = sandbox.run_code(model(messages))
        if cell.error is None:
            break
        print("attempt", len(messages), "failed:", cell.error.name)
        messages.append(cell.error.traceback)
    print("attempt", len(messages), "says", cell.text)

# Prints:
# attempt 1 failed: TypeError
# attempt 2 says 4.0
