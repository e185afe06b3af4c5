//! Complete runs of `cube-bench` that start their own `cube-api`, with real guests.
#![expect(
    clippy::unwrap_used,
    reason = "a missing artefact should stop the test with its error"
)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use harness::report::document::Document;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A scenario without comparison rounds and without a baseline.
const ALONE: &str = r#"
rounds = 2
warmup_rounds = 1
[target]
kind = "e2b"
warm = 2
start_timeout = "120s"
[arrival]
starts = 3
[exec]
timeout = "120s"
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
"#;

/// Two rates, and a watched pool.
const STEADY: &str = r#"
rounds = 1
warmup_rounds = 0
[target]
kind = "e2b"
warm = 2
watch = "20ms"
start_timeout = "120s"
[arrival]
kind = "steady"
rates_per_s = [1, 4]
lasts = "3s"
spacing = "constant"
[exec]
timeout = "120s"
[hold]
until = "exec"
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
"#;

/// Forks of a prepared parent. The forks must have the variables and the uploaded file of the parent.
const FORKS: &str = r#"
rounds = 2
warmup_rounds = 0
[target]
kind = "e2b"
template = "code-interpreter-v1"
warm = 1
start_timeout = "300s"
[mode]
kind = "forks"
[[mode.parent]]
cell = "seen = [1, 2]"
[[mode.parent]]
upload = "/proc/sys/kernel/ostype"
to = "/tmp/file"
[arrival]
starts = 3
[exec]
cell = "seen.append(3); print('has'); seen"
expect_stdout = "has\n[1, 2, 3]"
timeout = "300s"
[[turns]]
name = "state stays"
cell = "sum(seen)"
expect_stdout = "6"
[[turns]]
name = "file came along"
argv = ["/bin/cat", "/tmp/file"]
expect_stdout = "Linux\n"
[hold]
until = "exec"
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
"#;

/// Repeated turns with the same work, in clones with and without prefault.
const TAX: &str = r#"
rounds = 4
warmup_rounds = 0
[target]
start_timeout = "120s"
[mode]
kind = "beside"
with = "vmm-direct"
prefault = "off"
[arrival]
kind = "closed"
starts = 3
[exec]
timeout = "120s"
[[turns]]
name = "work"
argv = ["/usr/bin/python3", "-c", "print(sum(range(1000)))"]
expect_stdout = "499500\n"
times = 4
[hold]
until = "exec"
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
"#;

/// All kinds of exchanges, in sandboxes with a network policy.
const NETWORK: &str = r#"
rounds = 2
warmup_rounds = 0
[target]
kind = "e2b"
start_timeout = "120s"
[network]
kind = "isolated"
[arrival]
starts = 2
[exec]
argv = ["/bin/bash", "-c", "exec 3<>/dev/tcp/{peer}/{port} && echo ok >&3 && read -r word <&3 && echo $word"]
timeout = "120s"
[[turns]]
name = "echo"
exchange = "echo"
count = 20
[[turns]]
name = "denied"
exchange = "denied"
[[turns]]
name = "churn"
exchange = "churn"
count = 4
every = "500ms"
[hold]
exec_after = true
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
[[gates]]
name = "again"
metric = "after_hold.failures"
limit = "0"
"#;

/// The same exchanges in sandboxes with eBPF programs and in comparison clones without them.
const BESIDE: &str = r#"
rounds = 10
warmup_rounds = 0
[target]
kind = "e2b"
warm = 1
start_timeout = "120s"
[mode]
kind = "beside"
with = "vmm-direct"
[network]
kind = "isolated"
[exec]
argv = ["/bin/bash", "-c", "exec 3<>/dev/tcp/{peer}/{port} && echo ok >&3 && read -r word <&3 && echo $word"]
timeout = "120s"
[[turns]]
name = "echo"
exchange = "echo"
count = 20
[[turns]]
name = "send"
exchange = "send"
amount = "1MiB"
[[turns]]
name = "receive"
exchange = "receive"
amount = "1MiB"
[hold]
until = "exec"
[baseline]
kind = "none"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
"#;

/// A drain, the same cluster reached through its second node, and a single server.
const DRAINED: &str = r#"
rounds = 1
warmup_rounds = 0
[mode]
kind = "cluster"
nodes = 3
[target]
kind = "e2b"
warm = 1
start_timeout = "120s"
[arrival]
kind = "closed"
starts = 12
[exec]
timeout = "120s"
[mode.event]
kind = "drain-node"
after = "100ms"
running = 2
paused = 1
written = "4MiB"
[hold]
until = "exec"
[baseline]
kind = "none"
[[mode.systems]]
name = "second"
kind = "e2b"
by = ["b"]
[[mode.systems]]
name = "alone"
kind = "e2b"
warm = 1
[[gates]]
name = "all"
metric = "failures"
limit = "0"
[[gates]]
name = "nothing is lost"
metric = "event.lost"
limit = "0"
"#;

/// Runs `cube-bench` on the artefacts of the test tier, in a temporary directory.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        // The path is short because addresses of Unix sockets are limited to 107 bytes.
        let dir = tempfile::Builder::new().prefix("hb").tempdir_in("/tmp");
        Self { dir: dir.unwrap() }
    }

    fn run_root(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn run(&self, scenario: &str) -> Output {
        self.run_on(scenario, &variable("CUBE_ARTIFACTS"))
    }

    fn run_on(&self, scenario: &str, artifacts: &Path) -> Output {
        let path = self.dir.path().join("test.toml");
        // Other tests run at the same time, and must not cause a round to be excluded.
        let rule = "\n[interference]\nforeign_cpu_share = 1.0\nmemory_wait_share = 1.0\n";
        std::fs::write(&path, format!("{scenario}{rule}")).unwrap();
        Command::new(env!("CARGO_BIN_EXE_cube-bench"))
            .args(["run", "--format", "json", "--artifacts"])
            .arg(artifacts)
            .arg("--vmm")
            .arg(variable("CUBE_BIN").join("cube-vmm"))
            .arg("--api")
            .arg(variable("CUBE_BIN").join("cube-api"))
            .arg("--probe")
            .arg(variable("CUBE_BIN").join("cube-netprobe"))
            .arg("--run-root")
            .arg(self.run_root())
            .arg("--results")
            .arg(self.dir.path().join("results"))
            .arg(path)
            .output()
            .unwrap()
    }

    /// The process id of the current run, which is part of the name of its directory.
    fn harness(&self) -> i32 {
        let runs = std::fs::read_dir(self.run_root()).unwrap();
        let names = runs.map(|run| run.unwrap().file_name().into_string().unwrap());
        let pid = names.map(|name| name.split('-').nth(1).unwrap().parse().unwrap());
        pid.last().unwrap()
    }

    /// Processes started by any run: their standard error is a file of a run.
    fn processes(&self) -> Vec<u32> {
        testbed::leftovers::processes_of(&self.run_root())
    }

    /// Runs a scenario that must pass and leave no files below the run root, and returns its report.
    fn passes(&self, scenario: &str) -> Document {
        let output = self.run(scenario);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{stderr}\n{stdout}");
        let left: Vec<_> = std::fs::read_dir(self.run_root()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(self.processes(), [0_u32; 0]);
        serde_json::from_str(&stdout).unwrap()
    }
}

fn until(mut is_done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is_done() {
        assert!(Instant::now() < end, "not in time");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn variable(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    PathBuf::from(value.unwrap_or_else(|| panic!("{name} is not set: run `cargo xtask test`")))
}

#[test]
fn kvm_a_scenario_without_rounds_beside_runs_on_a_new_server() {
    let bench = Bench::new();
    let d = bench.passes(ALONE);
    assert_eq!(
        (d.n, d.failures.len(), d.ended.as_str()),
        (6, 0, "complete")
    );
    for phase in ["replied", "first_exec"] {
        assert_eq!(
            (d.phases[phase].n, d.phases[phase].failed),
            (6, 0),
            "{phase}"
        );
    }
    assert!(d.starts.contains_key("warm"), "{:?}", d.starts.keys());
    assert!(d.cost.cpu_per_start.unwrap().ms > 0.0);
    let pool = d.cost.pool.unwrap();
    assert_eq!(pool.slots, 2);
    assert!(pool.until_full_ms.unwrap() > 0.0 && pool.hit_rate.unwrap() > 0.0);
    // A guest that has booted has written more than 100 pages, and the template is larger than the server.
    assert!(pool.idle_slot_bytes.unwrap() > 400_000.0, "{pool:?}");
    assert!(pool.templates_bytes > pool.server_bytes, "{pool:?}");
    assert!(d.beside.is_none() && d.baseline.is_none());
}

#[test]
fn kvm_each_rate_and_each_level_of_the_pool_has_its_own_row() {
    let d = Bench::new().passes(STEADY);
    let load = d.load.unwrap();
    let n: Vec<_> = load
        .rates
        .iter()
        .map(|at| (at.rate_per_s, at.first_exec.n))
        .collect();
    assert_eq!(n, [(1.0, 3), (4.0, 12)]);
    for at in &load.rates {
        assert_eq!(at.first_exec.failed, 0);
        assert!(at.cpu_ms_per_start.unwrap() > 0.0 && at.until_full_ms.is_some());
        assert_eq!(at.sustained, at.reason.is_none());
    }
    let levels: usize = load.levels.iter().map(|at| at.first_exec.n).sum();
    assert!(levels > 0 && levels <= 15, "{levels}");
}

#[test]
fn interpreter_forks_continue_with_the_state_of_their_parent() {
    let d = Bench::new().passes(FORKS);
    assert_eq!((d.n, d.phases["first_exec"].failed), (6, 0));
    let turns = d.turns.unwrap();
    let n: Vec<_> = turns
        .turns
        .iter()
        .map(|t| (t.latency.n, t.latency.failed))
        .collect();
    assert_eq!(n, [(6, 0), (6, 0)]);
    assert!(
        turns.first_exec_faults.unwrap() > 0.0,
        "the VMMs are processes of this host"
    );
    assert!(turns.tax.is_none());
    assert_eq!(d.round.unwrap().n, 2);
}

#[test]
fn kvm_the_tax_is_measured_with_and_without_prefault() {
    let d = Bench::new().passes(TAX);
    assert_eq!(d.beside_name.as_deref(), Some("prefault off"));
    let (on, off) = (d.turns.unwrap(), d.beside_turns.unwrap());
    for turns in [&on, &off] {
        let faults = |at: usize| turns.turns[at].faults.unwrap();
        assert!(
            faults(0) > faults(3),
            "the first turn touches more pages: {turns:?}"
        );
        let tax = turns.tax.as_ref().unwrap();
        assert!(tax.faults.unwrap() > 0.0 && tax.time.p50_ms.is_some());
    }
    assert_eq!((d.n, d.beside.unwrap()["first_exec"].n), (12, 12));
}

#[test]
fn kvm_all_kinds_of_exchanges_are_measured() {
    let d = Bench::new().passes(NETWORK);
    let first = |phase: &str| (d.phases[phase].n, d.phases[phase].failed);
    for phase in ["confined", "replied", "first_network_byte", "first_exec"] {
        assert_eq!(first(phase), (4, 0), "{phase}");
    }
    assert!(d.phases["first_network_byte"].max_ms < d.phases["first_exec"].max_ms);
    assert!(d.phases["confined"].max_ms < d.phases["replied"].max_ms);
    let turns = d.turns.unwrap().turns;
    assert_eq!(turns[0].latency.n, 4 * 20, "each round trip counts");
    assert_eq!(turns[2].latency.n, 4 * 4, "each replacement counts");
    assert_eq!(turns[2].effect.as_ref().unwrap().n, 4 * 2);
    assert_eq!(d.after_hold.unwrap().n, 4);
}

#[test]
fn kvm_traffic_that_should_be_denied_is_a_breach() {
    let open = "allow_out = [\"198.51.100.0/24\", \"203.0.113.0/24\"]";
    let scenario = NETWORK.replacen(
        "kind = \"isolated\"",
        &format!("kind = \"isolated\"\n{open}"),
        1,
    );
    let output = Bench::new().run(&scenario);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.failures.get("breach"), Some(&4), "{:?}", d.failures);
}

#[test]
fn kvm_exchanges_are_compared_with_and_without_ebpf_programs() {
    let d = Bench::new().passes(BESIDE);
    assert_eq!(d.beside_name.as_deref(), Some("plain"));
    assert_eq!(d.beside.unwrap()["first_network_byte"].failed, 0);
    let beside = d.beside_turns.unwrap().turns;
    assert_eq!((beside[0].latency.n, beside[0].latency.failed), (200, 0));
    for (turn, ratio) in d.turn_ratios.iter().enumerate() {
        assert_eq!(ratio.pairs, 10);
        assert!(ratio.ratio.unwrap() > 0.0 && ratio.ratio_ci95.is_some());
        assert_eq!(beside[turn].bytes_per_s.is_some(), turn > 0);
    }
}

#[test]
fn kvm_a_refused_template_ends_the_run_with_the_servers_reason() {
    let bench = Bench::new();
    let artifacts = bench.dir.path().join("artifacts");
    let broken = artifacts.join("templates/base");
    std::fs::create_dir_all(&broken).unwrap();
    for file in std::fs::read_dir(variable("CUBE_ARTIFACTS").join("templates/base")).unwrap() {
        let file = file.unwrap();
        if file.file_name() != model::template_file::STATE {
            std::os::unix::fs::symlink(file.path(), broken.join(file.file_name())).unwrap();
        }
    }
    let output = bench.run_on(ALONE, &artifacts);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.ended, "broken");
    let why = d.end_message.unwrap();
    assert!(why.contains("the server refuses the template"), "{why}");
    assert!(why.contains("cannot use an installed template"), "{why}");
    assert!(
        !why.contains("are warm"),
        "it did not wait for the timeout: {why}"
    );
}

#[test]
fn cluster_a_scenario_starts_nodes_drains_one_and_leaves_nothing() {
    let d = Bench::new().passes(DRAINED);
    let event = d.cluster.as_ref().and_then(|c| c.event.clone()).unwrap();
    assert_eq!((event.n, event.failed), (1, 0), "{event:?}");
    assert_eq!(
        (event.times["empty"].n, event.times["empty"].failed),
        (1, 0)
    );
    let gap = &event.times["gap"];
    assert_eq!((gap.n, gap.failed), (2, 0), "a client of each that runs");
    assert!(gap.max_ms > Some(20.0), "a move pauses: {gap:?}");
    // Each has written 4 MiB in addition to its template.
    assert!(event.counts["moved_bytes"] > 3 * (4 << 20), "{event:?}");
    let rates = d.cluster.unwrap().rates;
    let names: Vec<_> = rates.iter().map(|rate| rate.name.as_str()).collect();
    assert_eq!(names, ["target", "second", "alone"]);
    for rate in &rates {
        assert!(rate.starts_per_s > Some(0.0), "{rate:?}");
    }
    let systems = d.peers.unwrap().systems;
    assert!(systems.iter().all(|s| s.n == 12 && s.failures.is_empty()));
}

#[test]
fn cluster_a_scenario_reports_a_dead_node_and_its_return() {
    let killed = DRAINED
        .split_once("[[mode.systems]]")
        .unwrap()
        .0
        .replace("drain-node", "kill-node")
        .replace("paused = 1\n", "")
        // The first node forwards its creates, including to the node that dies.
        .replace("nodes = 3", "nodes = 3\nclosed = [\"a\"]")
        .replace(
            "kind = \"closed\"\nstarts = 12",
            "kind = \"open\"\nstarts = 80",
        );
    let d = Bench::new().passes(&killed);
    let event = d.cluster.unwrap().event.unwrap();
    assert_eq!((event.n, event.failed), (1, 0), "{event:?}");
    for (name, n) in [("unhealthy", 1), ("reported_lost", 2), ("ready_again", 1)] {
        let time = &event.times[name];
        assert_eq!((time.n, time.failed), (n, 0), "{name}");
    }
    // The node had renewed its lease of 10 s at most 3.3 s earlier.
    assert!(event.times["reported_lost"].max_ms > Some(5000.0));
}

#[test]
fn cluster_an_interrupted_scenario_leaves_no_process_and_no_file() {
    let bench = Bench::new();
    let run = std::thread::scope(|scope| {
        let run = scope.spawn(|| bench.run(&DRAINED.replace("rounds = 1", "rounds = 50")));
        // etcd, three servers and a VM of each.
        until(|| bench.processes().len() >= 7);
        let results = bench.dir.path().join("results/events.jsonl");
        until(|| std::fs::read_to_string(&results).is_ok_and(|text| text.contains("attempt")));
        let harness = bench.harness();
        kill(Pid::from_raw(harness), Signal::SIGINT).unwrap();
        run.join().unwrap()
    });
    assert_eq!(run.status.code(), Some(130));
    let left: Vec<_> = std::fs::read_dir(bench.run_root()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(bench.processes(), [0_u32; 0]);
}
