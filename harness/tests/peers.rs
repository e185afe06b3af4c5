//! Comparisons of systems: a stand-in VMM, host processes, an adapter, and a program that is missing.

#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use harness::report::document::Document;
use support::{Stage, until};

/// Responds to each request. A start creates a file; a stop or the end of the input removes it.
const ADAPTER: &str = r#"
import json, os, sys
place = sys.argv[1]
for line in sys.stdin:
    r = json.loads(line)
    a = {"id": r["id"]}
    if r["op"] == "hello":
        a.update(protocol=1, version="1.2", platform="files")
    if r["op"] == "start":
        open(os.path.join(place, r["name"]), "w").close()
        a["sandbox"] = r["name"]
    if r["op"] == "exec":
        a.update(status=0, stdout="ok\n" if len(os.listdir(place)) < 9 else "no\n")
    if r["op"] == "stop":
        os.remove(os.path.join(place, r["sandbox"]))
    print(json.dumps(a), flush=True)
for name in os.listdir(place):
    os.remove(os.path.join(place, name))
"#;

fn scenario(stage: &Stage, rounds: u32) -> String {
    let place = stage.dir.path().join("sandboxes");
    std::fs::create_dir_all(&place).expect("a writable directory");
    let program = stage.dir.path().join("adapter.py");
    std::fs::write(&program, ADAPTER).expect("a writable directory");
    format!(
        r#"
rounds = {rounds}
warmup_rounds = 0
[hold]
until = "exec"
[arrival]
kind = "closed"
starts = 5
workers = 1
[exec]
argv = ["/bin/echo", "ok"]
[mode]
kind = "systems"
[[mode.systems]]
name = "files"
kind = "adapter"
command = ["python3", "{}", "{}"]
[[mode.systems]]
name = "processes"
kind = "process"
argv = ["/bin/echo", "yes"]
expect_stdout = "yes\n"
[[mode.systems]]
name = "absent"
kind = "adapter"
command = ["/no/such/program"]
[[mode.systems]]
name = "wrong"
kind = "process"
expect_stdout = "something else"
argv = ["/bin/echo", "ok"]
"#,
        program.display(),
        place.display()
    )
}

fn sandboxes(stage: &Stage) -> usize {
    let place = stage.dir.path().join("sandboxes");
    std::fs::read_dir(place)
        .expect("the directory of the adapter")
        .count()
}

#[test]
fn systems_are_compared_and_a_missing_one_is_a_row() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.run(&scenario(&stage, 20));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    let peers = d.peers.unwrap();
    assert_eq!(peers.reference.as_deref(), Some("target"));
    assert_eq!(peers.missing, 2, "{stderr}");
    let names: Vec<&str> = peers.systems.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "target",
            "files",
            "processes",
            "absent",
            "wrong",
            "host process"
        ]
    );
    let system = |name: &str| peers.systems.iter().find(|s| s.name == name).unwrap();
    for name in ["target", "files", "processes"] {
        let system = system(name);
        assert_eq!((system.n, system.failures.len()), (100, 0), "{name}");
        let exec = system.first_exec.as_ref().unwrap();
        let gone = system.gone.as_ref().unwrap();
        assert!(
            exec.p95_ms.unwrap() > 0.0 && gone.p95_ms >= exec.p95_ms,
            "{name}"
        );
        assert_eq!(system.p95_ratio.is_some(), name != "target");
    }
    let ratio = system("files").p95_ratio.unwrap();
    let [low, high] = ratio.ratio_ci95.unwrap();
    assert!(low <= ratio.ratio.unwrap() && ratio.ratio.unwrap() <= high);
    assert_eq!(system("files").platform.as_deref(), Some("files"));
    let absent = system("absent");
    assert!(
        absent
            .missing
            .as_ref()
            .unwrap()
            .contains("/no/such/program")
    );
    assert_eq!((absent.n, absent.p50_ratio), (0, None));
    assert!(
        system("wrong")
            .missing
            .as_ref()
            .unwrap()
            .contains("something else")
    );
    for file in ["report.md", "report.html"] {
        let text = std::fs::read_to_string(stage.results().join(file)).unwrap();
        assert!(
            text.contains("absent") && text.contains("/no/such/program"),
            "{file}"
        );
    }
    assert_eq!(sandboxes(&stage), 0);
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
}

#[test]
fn an_interrupted_comparison_leaves_nothing_and_reports_what_it_has() {
    let Some(stage) = Stage::set() else { return };
    let child = stage.start(&scenario(&stage, 100_000));
    let events = stage.results().join("events.jsonl");
    until("measured starts of the adapter", || {
        let text = std::fs::read_to_string(&events).unwrap_or_default();
        text.matches(r#""peer":0"#).count() > 10
    });
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert!(d.peers.unwrap().systems[1].n > 0);
    assert_eq!(sandboxes(&stage), 0);
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
}
