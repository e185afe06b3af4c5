//! Lifetimes and traces: sandboxes of a stand-in that end while others start.
#![expect(
    clippy::unwrap_used,
    reason = "a stage that cannot be set should stop the test"
)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use harness::{event::RunEvent, plan::Subject, record, report::document::Document};
use serde_json::Value;

/// Writes a line for each start and stop, with the time in nanoseconds of CLOCK_MONOTONIC. With a second argument,
/// that number of starts must be in progress or complete before the response to a stop is sent, and the last of
/// these starts completes only after the first stop. If starts wait for lifetimes, or lifetimes wait for starts,
/// requests time out and the run fails.
const ADAPTER: &str = r#"
import json, sys, threading, time
log, changed, counts = open(sys.argv[1], "w"), threading.Condition(), {"start": 0, "stop": 0}
all = int(sys.argv[2])
def answer(r):
    a = {"id": r["id"]}
    op = r["op"]
    with changed:
        if op == "hello":
            a["protocol"] = 1
        if op == "start":
            a["sandbox"] = r["name"]
        if op == "exec":
            a.update(status=0, stdout="ok\n")
        if op in counts:
            counts[op] += 1
            changed.notify_all()
            name = r.get("name") or r["sandbox"]
            log.write(f"{op} {name} {time.monotonic_ns()}\n")
            log.flush()
        if op == "start" and counts[op] == all:
            changed.wait_for(lambda: counts["stop"] > 0)
        if op == "stop":
            changed.wait_for(lambda: counts["start"] >= all)
        print(json.dumps(a), flush=True)
for line in sys.stdin:
    threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
"#;

struct Stage(tempfile::TempDir);

impl Stage {
    fn new() -> Self {
        Self(
            tempfile::Builder::new()
                .prefix("hb")
                .tempdir_in("/tmp")
                .unwrap(),
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a scenario with these keys of `[hold]` and `[arrival]`. `together` is the adapter's second argument.
    fn scenario(&self, name: &str, together: u32, keys: &str) -> PathBuf {
        fs::write(self.path("adapter.py"), ADAPTER).unwrap();
        let text = format!(
            "rounds = 1\nwarmup_rounds = 0\n[target]\nkind = \"adapter\"\ncommand = [\"python3\", \"{}\", \"{}\", \"{together}\"]\n\
             [exec]\nargv = [\"/bin/echo\", \"ok\"]\n[baseline]\nkind = \"none\"\n[interference]\n\
             foreign_cpu_share = 1.0\nmemory_wait_share = 1.0\n[[gates]]\nname = \"all\"\nmetric = \"failures\"\nlimit = \"0\"\n\
             [hold]\nuntil = \"lifetime\"\n{keys}",
            self.path("adapter.py").display(),
            self.path("log").display()
        );
        let file = self.path(name);
        fs::write(&file, text).unwrap();
        file
    }

    fn bench(&self, arguments: &[&str], file: &Path) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cube-bench"));
        command.env_remove("CI").args(arguments).arg(file);
        command.output().unwrap()
    }

    fn run(&self, file: &Path, results: &str) -> Document {
        let (dir, run, results) = (self.0.path(), self.path("run"), self.path(results));
        let arguments = [
            "run",
            "--format",
            "json",
            "--artifacts",
            dir.to_str().unwrap(),
            "--run-root",
            run.to_str().unwrap(),
            "--results",
            results.to_str().unwrap(),
        ];
        let output = self.bench(&arguments, file);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The round of the target in the plan of a scenario.
    fn plan(&self, file: &Path) -> Value {
        let output = self.bench(&["plan", "--format", "json"], file);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut rounds = plan["rounds"].as_array().unwrap().iter();
        let of_target = rounds.find(|round| round["subject"] == "clone");
        of_target.unwrap().clone()
    }

    /// Checks that each sandbox started at its planned time or later, and lived at least as long as planned. Starts
    /// are matched in the order of their intended times, which the record contains.
    fn check_lives(&self, plan: &Value, results: &str) {
        let events = record::read(&self.path(results)).unwrap();
        let (mut base_ns, mut intended) = (0, BTreeMap::new());
        for event in events {
            match event {
                RunEvent::RoundStarted {
                    subject: Subject::Clone,
                    base_ns: at_ns,
                    ..
                } => base_ns = at_ns,
                RunEvent::Attempt(attempt) if attempt.subject == Subject::Clone => {
                    let sandbox = format!("{}-{}", attempt.round, attempt.arrival);
                    intended.insert(attempt.arrival, (sandbox, attempt.intended_ns));
                }
                _ => {}
            }
        }
        let log = fs::read_to_string(self.path("log")).unwrap();
        let at_ns = |what: &str, sandbox: &str| -> u64 {
            let start = format!("{what} {sandbox} ");
            let times: Vec<&str> = log.lines().filter_map(|l| l.strip_prefix(&start)).collect();
            assert_eq!(times.len(), 1, "{what} {sandbox}: {log}");
            times[0].parse().unwrap()
        };
        let arrivals = plan["arrivals"].as_array().unwrap();
        let lifetimes = plan["lifetimes_ms"].as_array().unwrap();
        let planned: Vec<_> = arrivals.iter().zip(lifetimes).collect();
        assert_eq!(
            (planned.len(), planned.len()),
            (intended.len(), lifetimes.len())
        );
        for ((at, ms), (sandbox, intended_ns)) in planned.into_iter().zip(intended.values()) {
            let at = at["at_ns"].as_u64().unwrap();
            assert_eq!(intended_ns - base_ns, at, "{sandbox} has its place");
            let (start, stop) = (at_ns("start", sandbox), at_ns("stop", sandbox));
            assert!(start >= *intended_ns, "{sandbox} does not start early");
            let least = ms.as_u64().unwrap() * 1_000_000;
            assert!(stop >= start + least, "{sandbox}: {start} {stop} {least}");
        }
    }
}

#[test]
fn sandboxes_live_as_long_as_drawn_while_others_start() {
    let stage = Stage::new();
    let keys = "lifetime = \"200ms..400ms\"\n[arrival]\nkind = \"open\"\nstarts = 40\nrate_per_s = 200\nspacing = \"constant\"\n";
    let file = stage.scenario("t.toml", 40, keys);
    let document = stage.run(&file, "r");
    assert_eq!((document.n, document.phases["first_exec"].failed), (40, 0));
    let plan = stage.plan(&file);
    let lifetimes = plan["lifetimes_ms"].as_array().unwrap();
    let drawn = |ms: &Value| (200..=400).contains(&ms.as_u64().unwrap());
    assert!(lifetimes.iter().all(drawn), "{lifetimes:?}");
    stage.check_lives(&plan, "r");
}

#[test]
fn a_dumped_trace_is_replayed_in_the_same_order_with_the_same_lives() {
    let stage = Stage::new();
    let keys =
        "lifetime = \"100ms..900ms\"\n[arrival]\nkind = \"open\"\nstarts = 20\nrate_per_s = 100\n";
    let drawn = stage.scenario("drawn.toml", 0, keys);
    let trace = stage.path("trace.json");
    let arguments = ["plan", "--trace", trace.to_str().unwrap()];
    let output = stage.bench(&arguments, &drawn);
    assert_eq!(output.status.code(), Some(0));
    let replay = stage.scenario(
        "replay.toml",
        0,
        "[arrival]\nkind = \"trace\"\ntrace = \"trace.json\"\n",
    );
    let (before, after) = (stage.plan(&drawn), stage.plan(&replay));
    assert_eq!(before["lifetimes_ms"], after["lifetimes_ms"]);
    // A trace has milliseconds.
    let ms = |round: &Value| -> Vec<u64> {
        let arrivals = round["arrivals"].as_array().unwrap().iter();
        arrivals
            .map(|at| at["at_ns"].as_u64().unwrap() / 1_000_000)
            .collect()
    };
    assert_eq!(ms(&before), ms(&after));
    assert!(ms(&after).is_sorted(), "the order of the starts");
    let document = stage.run(&replay, "r");
    assert_eq!(document.n, 20);
    stage.check_lives(&after, "r");
}
