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

use harness::report::document::Document;

/// Writes a line for each start and stop, with the time in milliseconds since the first start.
const ADAPTER: &str = r#"
import json, sys, threading, time
log, lock, begun = open(sys.argv[1], "w"), threading.Lock(), []
def answer(r):
    a = {"id": r["id"]}
    with lock:
        now = time.monotonic()
        if r["op"] == "hello":
            a["protocol"] = 1
        if r["op"] == "start":
            begun.append(now)
            a["sandbox"] = r["name"]
        if r["op"] == "exec":
            a.update(status=0, stdout="ok\n")
        if r["op"] in ("start", "stop"):
            name = r.get("name") or r["sandbox"]
            log.write(f"{r['op']} {name} {(now - begun[0]) * 1000:.0f}\n")
            log.flush()
        print(json.dumps(a), flush=True)
for line in sys.stdin:
    threading.Thread(target=answer, args=(json.loads(line),)).start()
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

    /// Writes a scenario with these keys of `[hold]` and `[arrival]`.
    fn scenario(&self, name: &str, keys: &str) -> PathBuf {
        fs::write(self.path("adapter.py"), ADAPTER).unwrap();
        let text = format!(
            "rounds = 1\nwarmup_rounds = 0\n[target]\nkind = \"adapter\"\ncommand = [\"python3\", \"{}\", \"{}\"]\n\
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

    /// Start and stop of each sandbox in milliseconds, in the order of the starts.
    fn lives(&self) -> Vec<(f64, f64)> {
        let log = fs::read_to_string(self.path("log")).unwrap();
        let mut lives: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for line in log.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let ms: f64 = words[2].parse().unwrap();
            let life = lives.entry(words[1]).or_insert((0.0, f64::INFINITY));
            match words[0] {
                "start" => life.0 = ms,
                _ => life.1 = ms,
            }
        }
        let mut lives: Vec<_> = lives.into_values().collect();
        lives.sort_by(|a, b| a.0.total_cmp(&b.0));
        lives
    }
}

#[test]
fn sandboxes_live_as_long_as_drawn_while_others_start() {
    let stage = Stage::new();
    // All start within 0.2 s, and no life is shorter than a second: all of them are alive at once.
    let keys = "lifetime = \"1s..2s\"\n[arrival]\nkind = \"open\"\nstarts = 40\nrate_per_s = 200\nspacing = \"constant\"\n";
    let file = stage.scenario("t.toml", keys);
    let document = stage.run(&file, "r");
    assert_eq!((document.n, document.phases["first_exec"].failed), (40, 0));
    let lives = stage.lives();
    assert_eq!(lives.len(), 40);
    for (start, stop) in &lives {
        assert!(stop - start >= 1000.0, "none dies early: {lives:?}");
        assert!(stop.is_finite(), "all are killed");
    }
    let last_start = lives.iter().map(|life| life.0).fold(0.0, f64::max);
    let first_stop = lives
        .iter()
        .map(|life| life.1)
        .fold(f64::INFINITY, f64::min);
    assert!(last_start < first_stop, "{last_start} {first_stop}");
}

#[test]
fn a_dumped_trace_is_replayed_in_the_same_order_with_the_same_lives() {
    let stage = Stage::new();
    let keys =
        "lifetime = \"100ms..900ms\"\n[arrival]\nkind = \"open\"\nstarts = 20\nrate_per_s = 100\n";
    let drawn = stage.scenario("drawn.toml", keys);
    let trace = stage.path("trace.json");
    let arguments = ["plan", "--trace", trace.to_str().unwrap()];
    let output = stage.bench(&arguments, &drawn);
    assert_eq!(output.status.code(), Some(0));
    let replay = stage.scenario(
        "replay.toml",
        "[arrival]\nkind = \"trace\"\ntrace = \"trace.json\"\n",
    );
    let plan = |file: &Path| -> serde_json::Value {
        let output = stage.bench(&["plan", "--format", "json"], file);
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let rounds = plan["rounds"].as_array().unwrap();
        rounds
            .iter()
            .find(|round| round["subject"] == "clone")
            .unwrap()
            .clone()
    };
    let (before, after) = (plan(&drawn), plan(&replay));
    assert_eq!(before["lifetimes_ms"], after["lifetimes_ms"]);
    // A trace has milliseconds.
    let ms = |round: &serde_json::Value| -> Vec<u64> {
        let arrivals = round["arrivals"].as_array().unwrap().iter();
        arrivals
            .map(|at| at["at_ns"].as_u64().unwrap() / 1_000_000)
            .collect()
    };
    assert_eq!(ms(&before), ms(&after));
    let document = stage.run(&replay, "r");
    assert_eq!(document.n, 20);
    let lives = stage.lives();
    assert!(
        lives.len() == 20
            && lives
                .iter()
                .all(|(start, stop)| stop > start && stop.is_finite())
    );
}
