//! `cube-bench density` against a stand-in whose capacity is known.
#![expect(
    clippy::unwrap_used,
    reason = "a stage that cannot be set should stop the test"
)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use harness::report::density::DensityReport;

/// A platform that refuses starts beyond the 125th living sandbox.
const ADAPTER: &str = r#"
import json, sys, threading
alive, lock = set(), threading.Lock()
def answer(r):
    a = {"id": r["id"]}
    if r["op"] == "hello":
        a["protocol"] = 1
    if r["op"] == "start":
        with lock:
            if len(alive) == 125:
                a["error"] = "full"
            else:
                alive.add(r["name"])
                a["sandbox"] = r["name"]
    if r["op"] == "exec":
        a.update(status=0, stdout="ok\n")
    with lock:
        print(json.dumps(a), flush=True)
for line in sys.stdin:
    threading.Thread(target=answer, args=(json.loads(line),)).start()
"#;

fn scenario(dir: &Path, until: &str) -> String {
    fs::write(dir.join("adapter.py"), ADAPTER).unwrap();
    format!(
        r#"
rounds = 15
warmup_rounds = 0
[target]
kind = "adapter"
command = ["python3", "{}"]
[arrival]
kind = "closed"
workers = 10
starts = 10
[exec]
argv = ["/bin/echo", "ok"]
[hold]
until = "{until}"
[baseline]
kind = "none"
[interference]
foreign_cpu_share = 1.0
memory_wait_share = 1.0
"#,
        dir.join("adapter.py").display()
    )
}

fn density(dir: &Path, what: &Path, options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .env_remove("CI")
        .arg("density")
        .arg(what)
        .args(["--format", "json", "--artifacts"])
        .arg(dir)
        .arg("--run-root")
        .arg(dir.join("run"))
        .arg("--results")
        .arg(dir.join("r"))
        .args(options)
        .output()
        .unwrap()
}

#[test]
fn the_capacity_of_a_stand_in_is_found_in_a_run_and_again_in_its_record() {
    let dir = tempfile::Builder::new()
        .prefix("hb")
        .tempdir_in("/tmp")
        .unwrap();
    let file = dir.path().join("t.toml");
    fs::write(&file, scenario(dir.path(), "end")).unwrap();
    // No successful start takes this long.
    let output = density(dir.path(), &file, &["--p95", "1h"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let found: DensityReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (found.holds, found.misses),
        (Some(120), Some(130)),
        "{found:#?}"
    );
    assert_eq!(found.reasons[0], "5 starts failed, so 125 are alive");
    let last = found.levels.last().unwrap();
    assert_eq!((last.alive, last.target, last.failed), (125, 130, 5));
    assert_eq!(found.levels.len(), 13, "the run ends when starts fail");

    let results = dir.path().join("r");
    let page = fs::read_to_string(results.join("report.html")).unwrap();
    assert!(page.contains("<h2>Density</h2>") && page.contains("sandboxes alive"));
    let written = fs::read_to_string(results.join("density.json")).unwrap();
    assert_eq!(
        serde_json::from_str::<DensityReport>(&written).unwrap(),
        found
    );

    // The same record with other bounds: one that every P95 exceeds, and one for which no values were measured.
    let narrow = density(dir.path(), &results, &["--p95", "1ns"]);
    let narrow: DensityReport = serde_json::from_slice(&narrow.stdout).unwrap();
    assert_eq!((narrow.holds, narrow.misses), (None, Some(100)));
    let why = &narrow.reasons[0];
    assert!(
        why.starts_with("the P95 is ") && why.ends_with(" ms, above the bound of 0.000001 ms"),
        "{why}"
    );
    let changed = density(dir.path(), &results, &["--p95", "1h", "--set", "rounds=2"]);
    let stderr = String::from_utf8_lossy(&changed.stderr);
    assert_eq!(changed.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--set cannot change"), "{stderr}");
    let idle = density(dir.path(), &results, &["--idle-cpu", "5"]);
    let idle: DensityReport = serde_json::from_slice(&idle.stdout).unwrap();
    assert_eq!((idle.holds, idle.misses), (None, Some(130)));
    assert_eq!(idle.unknown, ["idle CPU time was not measured"]);
    let written = fs::read_to_string(results.join("density.json")).unwrap();
    assert_eq!(
        serde_json::from_str::<DensityReport>(&written).unwrap(),
        found,
        "kept"
    );
}

#[test]
fn a_density_without_enough_starts_is_inconclusive() {
    let dir = tempfile::Builder::new()
        .prefix("hb")
        .tempdir_in("/tmp")
        .unwrap();
    let file = dir.path().join("t.toml");
    fs::write(&file, scenario(dir.path(), "end")).unwrap();
    let output = density(dir.path(), &file, &["--p95", "1h", "--set", "rounds=2"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    let found: DensityReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((found.holds, found.misses), (None, None));
    assert_eq!(
        found.unknown,
        ["a P95 needs 100 starts, there were 20"],
        "{found:?}"
    );
}

#[test]
fn a_density_needs_a_bound_and_sandboxes_that_accumulate() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.toml");
    fs::write(&file, scenario(dir.path(), "exec")).unwrap();
    for (options, why) in [
        (&["--p95", "1s"][..], "hold.until = \"end\""),
        (&[], "--p95"),
    ] {
        let output = density(dir.path(), &file, options);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(why), "{stderr}");
    }
    assert!(!dir.path().join("r").exists());
}
