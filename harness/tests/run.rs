//! Whole runs of `cube-bench` against a stand-in VMM.

mod support;

use harness::{
    event::RunEvent,
    record,
    report::{document::Document, phase::PhaseDocument, work::FirstWork},
};
use support::{Stage, until};

const BURST: &str = r#"
rounds = 6
warmup_rounds = 1
cold_rounds = 2
[arrival]
kind = "burst"
starts = 20
[hold]
exec_after = true
[memory]
measure = true
settle = "1ms"
[[gates]]
name = "all"
metric = "failures"
limit = "0"
[[gates]]
name = "again"
metric = "after_hold.failures"
limit = "0"
"#;

const LONG: &str = r#"
[arrival]
kind = "burst"
starts = 5
[hold]
at_least = "60s"
"#;

fn interrupt(child: &std::process::Child) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT)
        .expect("a running child can be signalled");
}

/// The stand-in responds to every command with "ok".
#[test]
fn work_is_drawn_from_a_file_and_a_wrong_answer_is_a_failed_start() {
    let Some(stage) = Stage::set() else { return };
    let file = stage.dir.path().join("work.toml");
    let item = |id: &str, program: &str, expect: &str| {
        format!(
            "[[items]]\nid = '{id}'\nsource = 's'\nmodules = ['{program}']\nargv = ['/bin/{program}', '{id}']\nexpect = \"{expect}\"\n"
        )
    };
    let items = [
        item("right", "git", "ok\\n"),
        item("also-right", "tar", "ok\\n"),
        item("wrong", "git", "no\\n"),
    ];
    std::fs::write(&file, format!("kind = \"command\"\n{}", items.concat())).unwrap();
    let scenario = "warmup_rounds = 1\nrounds = 3\n[arrival]\nstarts = 4\n[hold]\nuntil = \"exec\"";
    let output = stage.command(scenario).arg("--work").arg(&file).output();
    let output = output.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let d: Document = serde_json::from_slice(&output.stdout).expect(&stderr);
    assert_eq!((d.n, d.failures["wrong_output"]), (12, 4));
    assert!(d.reproduce.ends_with(&format!("--work {}", file.display())));
    assert_eq!(d.first_work, FirstWork::Unseen);
    let work = d.work.unwrap();
    assert_eq!(
        (work.items, work.trained_items, work.sha256.len()),
        (3, 0, 64)
    );
    let n = |row: &Option<PhaseDocument>| row.as_ref().map(|row| (row.n, row.failed));
    // Warm-ups of the templates start git and do not start tar.
    assert_eq!(n(&work.clones.loaded), Some((8, 4)));
    assert_eq!(n(&work.clones.not_loaded), Some((4, 0)));
    assert_eq!(work.by_item[0].id, "wrong");
    assert!(work.by_item.iter().all(|item| item.n == 4));
}

#[test]
fn a_burst_is_measured_and_leaves_no_files() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.run(BURST);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (d.n, d.failures.len(), d.ended.as_str()),
        (120, 0, "complete")
    );
    let first_exec = &d.phases["first_exec"];
    assert!(first_exec.p95_ms.unwrap() >= first_exec.p50_ms.unwrap());
    assert_eq!(first_exec.p99_ms, None, "120 samples are too few");
    for phase in [
        "process_started",
        "memory_mapped",
        "resumed",
        "agent_ready",
        "replied",
    ] {
        assert_eq!(d.phases[phase].n, 120, "{phase}");
    }
    assert!(!d.phases.contains_key("confined"));
    assert_eq!(d.baseline.as_ref().unwrap().n, 120);
    let null = d.null_target.as_ref().unwrap();
    assert_eq!((null.n, null.failed), (120, 0));
    assert!(
        null.p50_ms.unwrap() < first_exec.p50_ms.unwrap(),
        "the harness alone does less than a start"
    );
    assert_eq!(d.cold.as_ref().unwrap().n, 2);
    assert_eq!(d.after_hold.as_ref().unwrap().n, 120);
    let memory = d.memory.as_ref().unwrap();
    assert_eq!((memory.points, memory.most_clones), (12, 20));
    assert!(memory.ledger.vmm_private_bytes.unwrap() > 0.0);
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
    for file in [
        "report.json",
        "report.md",
        "report.html",
        "report.xml",
        "first_exec.hgrm",
        "events.jsonl",
        "manifest.json",
        "environment.json",
    ] {
        assert!(stage.results().join(file).exists(), "{file}");
    }
    let again = std::process::Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["report", "--format", "json"])
        .arg(stage.results())
        .output()
        .unwrap();
    assert_eq!(
        again.stdout, output.stdout,
        "a report is a function of recorded data"
    );
}

#[test]
fn wrong_answers_are_failures_and_fail_the_gate() {
    let Some(stage) = Stage::set() else { return };
    stage.says("bm8K");
    let output = stage.run(BURST);
    assert_eq!(output.status.code(), Some(3));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.failures["wrong_output"], 120);
    let first_exec = &d.phases["first_exec"];
    assert_eq!((first_exec.failed, first_exec.p50_ms), (120, None));
    assert_eq!(d.phases["replied"].failed, 0);
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
}

#[test]
fn a_turn_with_wrong_output_fails_its_start() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.run(concat!(
        "rounds = 12\nwarmup_rounds = 0\n[baseline]\nkind = \"none\"\n",
        "[[turns]]\nname = \"right\"\nargv = [\"x\"]\nexpect_stdout = \"ok\\n\"\ntimes = 2\n",
        "[[turns]]\nname = \"wrong\"\nargv = [\"x\"]\nexpect_stdout = \"no\"\n",
    ));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((d.n, d.failures["wrong_output"]), (12, 12));
    assert_eq!(d.phases["first_exec"].failed, 0);
    let turns = d.turns.unwrap();
    let names: Vec<_> = turns.turns.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["right 1", "right 2", "wrong"]);
    let failed: Vec<_> = turns.turns.iter().map(|t| t.latency.failed).collect();
    assert_eq!(failed, [0, 0, 12]);
    assert!(turns.turns[0].latency.p50_ms.unwrap() > 0.0);
    assert!(turns.first_exec_faults.unwrap() > 0.0);
    assert!(turns.tax.is_none(), "the turns are not the same work");
    assert_eq!(d.round.unwrap().failed, 12);
}

#[test]
fn a_sweep_removes_the_files_of_a_killed_run() {
    let Some(stage) = Stage::set() else { return };
    let mut child = stage.start(LONG);
    until("five clones", || stage.sockets() == 5);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 1);
    let swept = stage.sweep();
    assert!(swept.status.success());
    let said = String::from_utf8_lossy(&swept.stderr);
    assert!(said.contains("removed 1 directories"), "{said}");
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
    assert!(
        stage.sweep().stderr.is_empty(),
        "a sweep that finds nothing prints nothing"
    );
}

#[test]
fn sigint_keeps_partial_results() {
    let Some(stage) = Stage::set() else { return };
    let text = "rounds = 1000\nwarmup_rounds = 0\n[arrival]\nkind = \"closed\"\nworkers = 2\nstarts = 1000\n[hold]\nuntil = \"exec\"\n";
    let child = stage.start(text);
    let events = stage.results().join("events.jsonl");
    until("a first attempt", || {
        std::fs::read_to_string(&events).is_ok_and(|t| t.contains("\"attempt\""))
    });
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.ended, "interrupted");
    assert!(d.n >= 1);
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
}

#[test]
fn sigint_ends_a_hold() {
    let Some(stage) = Stage::set() else { return };
    let child = stage.start(LONG);
    until("five clones", || stage.sockets() == 5);
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(std::fs::read_dir(stage.run_root()).unwrap().count(), 0);
}

#[test]
fn a_target_that_refuses_every_create_is_unreachable() {
    let Some(stage) = Stage::set() else { return };
    stage.refuse();
    let output = stage.run(BURST);
    assert_eq!(output.status.code(), Some(7));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.failures["restore"], 120);
}

#[test]
fn clones_that_accumulate_stop_at_the_first_failed_start() {
    let Some(stage) = Stage::set() else { return };
    stage.refuse();
    let output = stage.run(&BURST.replace("[hold]", "[hold]\nuntil = \"end\""));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((d.ended.as_str(), d.n), ("limit", 20), "one round of six");
    let why = d.end_message.unwrap();
    assert!(
        why.contains("20 of 20 starts failed while 0 clones"),
        "{why}"
    );
}

#[test]
fn idle_clones_have_a_fixed_cost_and_their_cpu_time_is_measured() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.run(&BURST.replace("[hold]", "[hold]\nat_least = \"50ms\""));
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    let memory = d.memory.unwrap();
    assert!(memory.fixed_bytes.is_some() && memory.idle_cpu_ms_per_s.is_some());
    assert!(
        memory.reclaim.scanned_pages.is_some(),
        "{:?}",
        memory.reclaim
    );
    assert!(memory.ledger.uncounted_bytes.is_some());
}

/// The stand-in responds to every command at once, and the host needs a moment for the same command.
#[test]
fn turns_are_compared_with_processes_of_the_host() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.run(concat!(
        "rounds = 12\nwarmup_rounds = 0\n[baseline]\nkind = \"none\"\n[mode]\nkind = \"beside\"\nwith = \"host-process\"\n",
        "[exec]\nargv = [\"/bin/echo\", \"ok\"]\n",
        "[[turns]]\nname = \"sleep\"\nargv = [\"/bin/sh\", \"-c\", \"sleep 0.1; echo ok\"]\nexpect_stdout = \"ok\\n\"\n",
    ));
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(d.beside_name.as_deref(), Some("host"));
    let host = &d.beside_turns.unwrap().turns[0];
    assert!(host.latency.p50_ms.unwrap() >= 100.0 && host.faults.is_none());
    assert_eq!(d.turn_ratios[0].pairs, 12);
    assert!(d.turn_ratios[0].ratio.unwrap() < 1.0);
}

#[test]
fn errors_about_missing_files_name_the_command_that_creates_them() {
    let bench = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_cube-bench"))
            .args(args)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    };
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/../scenarios/single.toml");
    let (code, text) = bench(&[
        "run",
        scenario,
        "--vmm",
        "/no/such",
        "--run-root",
        "/no/such/root",
    ]);
    assert_eq!(code, Some(7));
    assert!(text.contains("cargo xtask bench"), "{text}");
    let (code, text) = bench(&[
        "run",
        scenario,
        "--vmm",
        "/bin/true",
        "--artifacts",
        "/no/such",
        "--run-root",
        "/no/such/root",
    ]);
    assert_eq!(code, Some(2), "the scenario names the template");
    assert!(
        text.contains("/no/such/templates/base/manifest.json"),
        "{text}"
    );
    assert_eq!(bench(&["run", "/no/such.toml"]).0, Some(2));
    assert_eq!(bench(&["frobnicate"]).0, Some(2));
    assert_eq!(bench(&["report", "/no/such"]).0, Some(2));
    assert_eq!(bench(&["--help"]).0, Some(0));
}

#[test]
fn a_template_that_the_server_does_not_have_ends_the_run_before_its_first_round() {
    use std::io::{Read, Write};
    let server = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", server.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in server.incoming() {
            let mut stream = stream.expect("a connection");
            // The request is larger than nothing, and its end does not matter.
            let _ = stream.read(&mut [0; 4096]);
            let body = r#"{"code":404,"message":"template 'base' not found"}"#;
            let length = body.len();
            let head = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {length}\r\n\r\n");
            let _ = stream.write_all((head + body).as_bytes());
        }
    });
    let dir = tempfile::tempdir().expect("a directory");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .env("E2B_API_KEY", "e2b_0")
        .args(["run", "--target", &url, "--run-root"])
        .arg(dir.path().join("run"))
        .arg("--results")
        .arg(dir.path().join("results"))
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../scenarios/computesdk-burst.toml"
        ))
        .output()
        .expect("cube-bench runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("no template \"base\": set target.template"),
        "{text}"
    );
}

#[test]
fn the_cpu_time_of_a_measured_server_on_this_host_is_the_runs_own() {
    use std::io::{Read, Write};
    let server = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", server.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in server.incoming() {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 4096]);
            // 30 ms of CPU time, however long they take.
            let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
            let used = || std::time::Duration::from(clock.now().expect("a clock of this thread"));
            let until = used() + std::time::Duration::from_millis(30);
            while used() < until {}
            let _ = stream.write_all(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let dir = tempfile::tempdir().expect("a directory");
    let scenario = dir.path().join("busy.toml");
    let text = "rounds = 2\nwarmup_rounds = 0\n[arrival]\nkind = \"closed\"\nstarts = 30\n[hold]\nuntil = \"exec\"\n\
                [baseline]\nkind = \"none\"\n";
    std::fs::write(&scenario, text).expect("a scenario");
    let results = dir.path().join("results");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .env("E2B_API_KEY", "e2b_0")
        .args(["run", "--target", &url, "--run-root"])
        .arg(dir.path().join("run"))
        .arg("--results")
        .arg(&results)
        .arg(&scenario)
        .output()
        .expect("cube-bench runs");
    let text = String::from_utf8_lossy(&output.stderr);
    let own: Vec<Option<u64>> = (record::read(&results).expect(&text).iter())
        .filter_map(|event| match event {
            RunEvent::RoundUsage { usage, .. } => Some(usage.own_cpu_ns),
            _ => None,
        })
        .collect();
    if own.is_empty() || own.iter().all(Option::is_none) {
        eprintln!("skipped: this process may not create a cgroup");
        return;
    }
    assert!(text.contains("is the measured server"), "{text}");
    let own = own.into_iter().flatten().sum::<u64>() as f64 / 1e9;
    assert!(
        own > 60.0 * 0.030,
        "{own} s of the run, which made 60 requests of 30 ms"
    );
    let refused = std::process::Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["run", "--server-pid", "1", "--run-root"])
        .arg(dir.path().join("run"))
        .arg(&scenario)
        .output()
        .expect("cube-bench runs");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("remove --server-pid"), "{text}");
}

/// CPU time of a process in seconds (user and system time of /proc/PID/stat).
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process is alive");
    let stat = model::ProcessStat::parse(&stat).expect("proc(5)");
    stat.cpu_ticks as f64 / 100.0
}

#[test]
fn rounds_beside_a_busy_program_are_left_out_and_keep_their_samples() {
    const RULE: &str = "rounds = 4\n[arrival]\nkind = \"closed\"\nworkers = 1\nstarts = 60\n[hold]\nuntil = \"exec\"\n\
                        [interference]\nforeign_cpu_share = 0.05\n";
    let Some(stage) = Stage::set() else { return };
    let mut burner = std::process::Command::new("sh")
        .args(["-c", "while :; do :; done"])
        .spawn()
        .unwrap();
    let before = cpu_seconds(burner.id());
    let output = stage.run(RULE);
    let burned = cpu_seconds(burner.id()) - before;
    burner.kill().unwrap();
    burner.wait().unwrap();
    let events = record::read(&stage.results()).unwrap();
    let attempts = events.iter().filter(|e| matches!(e, RunEvent::Attempt(_)));
    // A warm-up and four repetitions of clones, host processes and the null target.
    assert_eq!(attempts.count(), 5 * 3 * 60, "raw samples are kept");
    let usage = events.iter().filter_map(|event| match event {
        RunEvent::RoundUsage { usage, .. } => Some(*usage),
        _ => None,
    });
    let usage: Vec<_> = usage.collect();
    if usage.iter().all(|usage| usage.foreign_cpu_ns.is_none()) {
        eprintln!("skipped: this process may not create a cgroup");
        return;
    }
    assert_eq!(usage.len(), 15);
    let total = |ns: fn(&harness::event::RoundUsage) -> Option<u64>| {
        usage.iter().filter_map(ns).sum::<u64>() as f64 / 1e9
    };
    let (own, foreign) = (
        total(|u| u.own_cpu_ns),
        total(harness::event::RoundUsage::programs_ns),
    );
    assert!(own > 0.0);
    // Rounds are only part of the run, and the burner may have had to wait for a CPU.
    assert!(
        foreign > 0.1 * burned,
        "{foreign} s of others, {burned} s burned"
    );
    let d: Document = serde_json::from_slice(&output.stdout).unwrap();
    let found = d.interference.unwrap();
    assert_eq!((found.repetitions, found.left_out), (4, 4), "{found:?}");
    assert!(
        found.reasons.iter().all(|why| why.contains("CPU time")),
        "{found:?}"
    );
    assert!(
        found.rule.contains("5 %"),
        "the rule is printed: {}",
        found.rule
    );
    assert_eq!((d.n, d.host.grade.as_str()), (0, "unfit"));
    assert_eq!(output.status.code(), Some(5), "nothing was measured");
    assert_eq!(d.null_target, None);
}
