"""What Pi's sandbox can reach, what it cannot, and what the server has recorded of both."""

import json
import os
import time
import urllib.request

from pi_sandbox import HOST, create, prompt, said, store_key


def network_events(sandbox_id: str) -> list[dict]:
    """A route of this server that E2B does not have."""
    url = f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox_id}/network/events"
    request = urllib.request.Request(url, headers={"X-API-Key": os.environ["E2B_API_KEY"]})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def attempt(sandbox, url: str) -> str:
    command = f"curl -s -o /dev/null -w '%{{http_code}}' --max-time 5 {url} || true"
    return sandbox.commands.run(command).stdout.strip()


store_key()
with create() as sandbox:
    print("pi:", said(prompt(sandbox, "Say hello.")))
    print("another host:", attempt(sandbox, "https://pypi.org/"))
    print("an address:", attempt(sandbox, "http://198.51.100.7/"))
    # The resolver answers only names that are allowed. A name in the request does not help either.
    print("another name at the same address:", attempt(sandbox, f"https://{HOST}/ -H 'Host: evil.example'"))
    deadline = time.monotonic() + 10
    while True:
        events = network_events(sandbox.sandbox_id)
        calls = [event["call"] for event in events if event.get("call")]
        refused = {event.get("name") or event["destination"] for event in events if event["reason"] != "none"}
        if len(refused) >= 3 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    call = calls[0]
    print("recorded:", call["method"], call["path"], call["status"], "secrets", *call["secrets"])
    print("refused:", *sorted(refused))

# Prints:
# pi: Hello.
# another host: 000
# an address: 000
# another name at the same address: 421
# recorded: POST /v1/messages 200 secrets anthropic
# refused: 198.51.100.7:80 evil.example pypi.org
