"""The responses of the stand-in models.

A script is selected by its first prompt. Its responses are in the order of the requests: the number of the model's own
messages in a request is the index of the response. The stand-in therefore needs no state.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The model calls a tool. `arguments` by the name of the tool."""

    tool: str
    arguments: dict


CODE = "rows = [3, 5, 10]\nprint(sum(rows) / len(rows))"
SCRIPTS: dict[str, list[Call | str]] = {
    # Pi
    "mean.py fails.": [
        Call("bash", {"command": "python3 mean.py 2>&1 | tail -1"}),
        Call(
            "edit",
            {
                "path": "mean.py",
                "edits": [{"oldText": "len(value)", "newText": "len(values)"}],
            },
        ),
        Call("bash", {"command": "python3 mean.py"}),
        "The name was misspelt: `value` is now `values`, and the program prints 4.0.",
    ],
    "Remember the number 42.": ["I will remember 42.", "It was 42."],
    "Say hello.": ["Hello."],
    # Claude Code
    "total.py fails.": [
        Call("bash", {"command": "python3 total.py 2>&1 | tail -1"}),
        Call("read", {"file_path": "/workspace/total.py"}),
        Call(
            "edit",
            {"file_path": "/workspace/total.py", "old_string": "sum(value)", "new_string": "sum(values)"},
        ),
        Call("bash", {"command": "python3 total.py"}),
        "The name was misspelt: `value` is now `values`, and the program prints 8.",
        "It was in line 2.",
    ],
    # OpenAI Agents SDK, LangChain
    "What is the mean of 3, 5 and 10?": [Call("run_python", {"code": CODE}), "The mean is 6.0."],
    "Which kernel does the sandbox run?": [
        Call("run_python", {"code": "import platform\nprint(platform.system())"}),
        "It runs Linux.",
    ],
    # Other frameworks: the tool's name is in the question.
    **{
        f"Run uname with {tool}.": [Call(tool, {"command": "uname -s"}), "It runs Linux."]
        for tool in ("execute", "Execute", "run_bash_command")
    },
    "with run_python_code.": [Call("run_python_code", {"code": CODE}), "The mean is 6.0."],
    # smolagents, which runs the code in the answer
    "Compute the mean of 3, 5 and 10 with code.": ["<code>\nfinal_answer(sum([3, 5, 10]) / 3)\n</code>"],
    # mini-swe-agent
    "Repair add.py": [
        Call("bash", {"command": "cat add.py"}),
        Call("bash", {"command": "sed -i 's/a - b/a + b/' add.py && python3 -c 'from add import add; print(add(2, 3))'"}),
        Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"}),
    ],
}


def answer(prompts: list[str], asked: int) -> Call | str:
    """The response to a conversation with these texts of the user, after `asked` messages of the model."""
    for begin, answers in SCRIPTS.items():
        if any(begin in prompt for prompt in prompts):
            return answers[min(asked, len(answers) - 1)]
    return f"There is no script for {prompts!r:.500}"
