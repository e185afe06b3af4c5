"""Debian's Prometheus scrapes the server of the run; every rule and every dashboard query is evaluated.

    monitoring.py DIR      DIR has prometheus and promtool
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from e2b import Sandbox

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "operate" / "monitoring"
PROMETHEUS = "http://127.0.0.1:9090"
# Metric families that a server has only if it has refused, failed, proxied or paused something. This server has no
# warm slots, because tracing.py examines the trace of a cold start.
MAY_BE_EMPTY = ['warm="true"', "failed", "refused", "egress", "died", "network", "webhook", "template"]


def query(expression: str) -> list:
    url = f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["data"]["result"]


def until(what: str, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.2)


def targets_up() -> bool:
    try:
        return [float(sample["value"][1]) for sample in query('up{job="cube"}')] == [1.0]
    except OSError:
        return False


def starts_are_counted() -> bool:
    with Sandbox.create(timeout=60) as sandbox:
        sandbox.commands.run("true")
    rates = query('rate(cube_start_phase_seconds_count{phase="agent_ready"}[1m])')
    return any(float(sample["value"][1]) > 0 for sample in rates)


def main(programs: pathlib.Path) -> None:
    def promtool(*words: object, **options) -> subprocess.CompletedProcess:
        command = [programs / "promtool", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=DOCS, **options)
        if done.returncode:
            raise SystemExit(f"promtool {' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done

    promtool("check", "rules", "cube.rules.yml")
    promtool("test", "rules", "cube.rules.test.yml")
    print("rules and their tests pass")
    key = os.environ["E2B_API_KEY"]
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        (work / "cube.key").write_text(key)
        text = (DOCS / "prometheus.yml").read_text()
        text = text.replace("/etc/prometheus/cube.key", str(work / "cube.key")).replace("15s", "1s")
        (work / "prometheus.yml").write_text(text)
        (work / "cube.rules.yml").write_text((DOCS / "cube.rules.yml").read_text())
        promtool("check", "config", work / "prometheus.yml")
        words = [programs / "prometheus", "--config.file", work / "prometheus.yml", "--storage.tsdb.path", work / "data",
                 "--web.listen-address", "127.0.0.1:9090"]  # fmt: skip
        prometheus = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until("the first scrape", targets_up)
            before = len(query("cube_pool_running"))
            # Rates need samples before and after.
            until("starts in the rates", starts_are_counted)
            print("scraped:", before, "server")
            dashboard = json.loads((DOCS / "dashboard.json").read_text())
            empty, count = [], 0
            for panel in dashboard["panels"]:
                for target in panel["targets"]:
                    expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
                    count += 1
                    if not query(expression) and not any(word in expression for word in MAY_BE_EMPTY):
                        empty.append(expression)
            print("queries without values:", empty)
            with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/rules") as answer:
                groups = json.load(answer)["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            until("the rules", lambda: query("cube:start_seconds:p95"))
            print("unhealthy rules:", [rule["name"] for rule in rules if rule["health"] == "err"])
            families = set(re.findall(r"cube_[a-z_]+", " ".join([text] + [r["query"] for r in rules])))
            print("queries:", count >= 20, "rules:", len(rules) >= 12, "families:", len(families) >= 10)
        finally:
            prometheus.terminate()
            prometheus.wait()
    # The text of /metrics is OpenMetrics, which Prometheus has parsed. promtool's linter reads the older format.
    request = urllib.request.Request(f"{os.environ['E2B_API_URL']}/metrics", headers={"X-API-Key": key})
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    older = "\n".join(re.sub(r"^(# (?:HELP|TYPE)) (\S+)(?= .*)", lambda m: f"{m[1]} {m[2]}", line) for line in lines if line != "# EOF")
    counters = set(re.findall(r"^# TYPE (\S+) counter$", older, re.M))
    older = re.sub(r"^(# (?:HELP|TYPE)) (\S+)", lambda m: f"{m[1]} {m[2]}_total" if m[2] in counters else m[0], older, flags=re.M)
    promtool("check", "metrics", input=older + "\n")
    print("metrics pass the linter")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

# Prints:
# rules and their tests pass
# scraped: 1 server
# queries without values: []
# unhealthy rules: []
# queries: True rules: True families: True
# metrics pass the linter
