"""The loop of an agent: run what the model wrote, show it the error, run what it wrote next.

The model is played by a list, so that the program needs no key and always does the same.
"""

from e2b_code_interpreter import Sandbox

TASK = "the mean of the scores in scores.json"
ANSWERS = [
    # It has not looked at the file, and takes it for a list of numbers.
    "import json\nscores = json.load(open('scores.json'))\nsum(scores) / len(scores)",
    # It has seen the error.
    "values = [entry['score'] for entry in scores]\nsum(values) / len(values)",
]


def model(messages: list[str]) -> str:
    """An agent asks a model here."""
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
