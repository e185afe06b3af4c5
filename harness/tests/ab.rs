//! `cube-bench ab` with stand-in VMMs: one of the two builds is slower, or fails.
#![expect(
    clippy::unwrap_used,
    reason = "a stage that cannot be set should stop the test"
)]

#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use harness::{
    ab::{compare::Finding, report::AbReport},
    event::{EndReason, RunEvent},
    record::{self, Recorder},
};
use support::Stage;

const SCENARIO: &str = r#"
warmup_rounds = 0
[arrival]
kind = "closed"
workers = 1
starts = 50
[hold]
until = "exec"
[[gates]]
name = "not evaluated"
metric = "first_exec.p50"
limit = "1ns"
"#;

/// Creates a build whose VMM starts after `delay`, an argument of `sleep`. `prints` is the output of commands, in
/// base64.
fn build(stage: &Stage, name: &str, delay: &str, prints: &str) -> PathBuf {
    let dir = stage.dir.path().join(name);
    let (bin, template) = (dir.join("bin"), dir.join("templates/base"));
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(&template).unwrap();
    for file in fs::read_dir(stage.dir.path().join("templates/base")).unwrap() {
        let from = file.unwrap().path();
        fs::copy(&from, template.join(from.file_name().unwrap())).unwrap();
    }
    fs::write(template.join(model::template_file::STATE), prints).unwrap();
    let vmm = bin.join("cube-vmm");
    let script = format!(
        "#!/bin/sh\nsleep {delay}\nexec {}\n",
        Stage::vmm().display()
    );
    fs::write(&vmm, script).unwrap();
    fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn ab(stage: &Stage, a: &Path, b: &Path, options: &[&str]) -> Output {
    let scenario = stage.dir.path().join("ab.toml");
    fs::write(&scenario, format!("{SCENARIO}{}", support::KEEP_ALL)).unwrap();
    Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--format", "json", "--scenario"])
        .arg(scenario)
        .arg("--run-root")
        .arg(stage.run_root())
        .arg("--results")
        .arg(stage.results())
        .args(options)
        .args([a, b])
        .output()
        .unwrap()
}

fn report(output: &Output) -> AbReport {
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {stderr}"))
}

#[test]
fn a_slower_vmm_is_found_and_the_report_can_be_computed_again() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let b = build(&stage, "b", "0.1", "b2sK");
    let output = ab(&stage, &a, &b, &["--blocks", "7", "--starts", "4"]);
    let found = report(&output);
    assert_eq!(output.status.code(), Some(3), "{found:#?}");
    assert_eq!(
        (found.pairs, found.exit_code, found.same_files),
        (7, 3, false)
    );
    let failures = &found.counts[0];
    assert_eq!(
        (failures.a, failures.a_n, failures.b, failures.b_n),
        (0, 28, 0, 28)
    );
    let first_exec = found.metrics.iter().find(|m| m.metric == "first_exec.p50");
    let first_exec = first_exec.unwrap();
    assert_eq!((first_exec.verdict, first_exec.pairs), (Finding::Worse, 7));
    assert!(first_exec.ratio > 1.0 && first_exec.ratio_ci95.unwrap()[0] > 1.0);
    assert!(
        found.metrics.iter().all(|m| !m.metric.ends_with("p95")),
        "28 starts are too few for a P95"
    );

    let blocks = fs::read_dir(stage.results().join("blocks")).unwrap();
    let mut blocks: Vec<_> = blocks
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    blocks.sort();
    assert_eq!(blocks.len(), 14);
    assert_eq!(blocks[..4], ["000-A", "001-B", "002-B", "003-A"]);
    let again = Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--format", "json", "--junit"])
        .arg(stage.dir.path().join("ab.xml"))
        .arg("--markdown")
        .arg(stage.dir.path().join("ab.md"))
        .arg("--report")
        .arg(stage.results())
        .output()
        .unwrap();
    assert_eq!(again.status.code(), Some(3));
    let xml = fs::read_to_string(stage.dir.path().join("ab.xml")).unwrap();
    assert!(
        xml.contains("name=\"first_exec.p50\"") && xml.contains("<failure"),
        "{xml}"
    );
    let page = fs::read_to_string(stage.dir.path().join("ab.md")).unwrap();
    assert!(
        page.contains("| first_exec.p50 ms |") && page.contains("| worse |"),
        "{page}"
    );
    assert_eq!(again.stdout, output.stdout);
    assert_eq!(fs::read_dir(stage.run_root()).unwrap().count(), 0);

    let second = ab(&stage, &a, &b, &["--blocks", "1"]);
    assert_eq!(second.status.code(), Some(2), "results are not overwritten");
}

#[test]
fn a_build_with_failures_is_worse_and_no_time_makes_it_better() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0.1", "b2sK");
    let b = build(&stage, "b", "0", "bm8K");
    let output = ab(&stage, &a, &b, &["--blocks", "7", "--starts", "2"]);
    let found = report(&output);
    assert_eq!(output.status.code(), Some(3), "{found:#?}");
    let failures = &found.counts[0];
    assert_eq!((failures.b, failures.verdict), (14, Finding::Worse));
    for metric in &found.metrics {
        assert_ne!(metric.verdict, Finding::Better, "{metric:?}");
    }
}

#[test]
fn too_few_blocks_are_named_and_inconclusive() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let output = ab(&stage, &a, &a, &["--blocks", "2", "--starts", "5"]);
    let found = report(&output);
    assert_eq!(output.status.code(), Some(5), "{found:#?}");
    assert!(found.same_files);
    for metric in &found.metrics {
        let judged = [Finding::Described, Finding::TooFewBlocks];
        assert_eq!(metric.verdict, judged[usize::from(metric.primary)]);
    }
    let human = Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--report"])
        .arg(stage.results())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&human.stdout).into_owned();
    let advice = format!("--blocks {}", found.blocks_needed);
    assert!(
        text.contains(&advice) && text.contains("too few blocks"),
        "{text}"
    );
}

#[test]
fn a_directory_without_a_build_is_named_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("ab.toml");
    fs::write(&scenario, SCENARIO).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--scenario"])
        .arg(&scenario)
        .arg("--results")
        .arg(dir.path().join("r"))
        .args([dir.path(), dir.path()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("cargo xtask prepare"), "{stderr}");
    assert!(!dir.path().join("r").exists());
}

#[test]
fn a_template_that_is_replaced_during_the_run_is_found_before_its_next_block() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let b = build(&stage, "b", "0", "b2sK");
    // The first VMM of B replaces the manifest, as a build in that checkout would.
    let manifest = b.join("templates/base").join(model::MANIFEST_NAME);
    let new = fs::read_to_string(&manifest).unwrap();
    let sum = "\"memory_sum\":{\"bytes\":0,\"sha256\":\"";
    assert!(new.contains(sum), "{new}");
    let at = new.find(sum).unwrap() + sum.len();
    let new = format!("{}f{}", &new[..at], &new[at + 1..]);
    fs::write(b.join("new"), new).unwrap();
    let vmm = b.join("bin/cube-vmm");
    let script = format!(
        "#!/bin/sh\ncp {} {}\nexec {}\n",
        b.join("new").display(),
        manifest.display(),
        Stage::vmm().display()
    );
    fs::write(&vmm, script).unwrap();
    let output = ab(&stage, &a, &b, &["--blocks", "4", "--starts", "2"]);
    assert_eq!(output.status.code(), Some(6));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let found = "build B changed before block 3: the template's memory was replaced";
    assert!(stderr.contains(found), "{stderr}");
}

/// Replaces the record of a run by the events that `change` returns.
fn record_again(run: &Path, change: impl FnMut(RunEvent) -> Option<RunEvent>) {
    let events = record::read(run).unwrap();
    fs::remove_file(run.join(record::EVENTS_FILE)).unwrap();
    let mut recorder = Recorder::create(run).unwrap();
    for event in events.into_iter().filter_map(change) {
        recorder.append(&event).unwrap();
    }
    recorder.seal().unwrap();
}

#[test]
fn a_block_that_could_not_measure_leaves_out_its_pair_and_no_other() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let output = ab(&stage, &a, &a, &["--blocks", "3", "--starts", "4"]);
    assert_eq!(report(&output).pairs, 3);
    // The record if memory.stop_at_share is in use before the measured round.
    let block = stage.results().join("blocks/002-B");
    record_again(&block, |event| match event {
        RunEvent::Attempt(_) => None,
        RunEvent::RunEnded { at_ns, .. } => {
            let why = EndReason::MemoryShare;
            Some(RunEvent::RunEnded { why, at_ns })
        }
        other => Some(other),
    });
    let again = Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--format", "json", "--report"])
        .arg(stage.results())
        .output()
        .unwrap();
    let found = report(&again);
    assert_eq!((found.pairs, found.pairs_left_out), (2, 1));
    assert_eq!(found.counts[0].a_n, 8, "the third pair is compared");
    assert_eq!(again.status.code(), Some(5), "complete, and too few blocks");
}

#[test]
fn a_comparison_whose_pairs_are_all_disturbed_is_inconclusive() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let output = ab(&stage, &a, &a, &["--blocks", "2", "--starts", "4"]);
    assert_eq!(report(&output).pairs, 2);
    for block in fs::read_dir(stage.results().join("blocks")).unwrap() {
        record_again(&block.unwrap().path(), |mut event| {
            if let RunEvent::RunStarted(started) = &mut event {
                let interference = started.scenario.interference.as_mut();
                interference.unwrap().foreign_cpu_share = -1.0;
            }
            Some(event)
        });
    }
    let again = Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .args(["ab", "--format", "json", "--report"])
        .arg(stage.results())
        .output()
        .unwrap();
    let found = report(&again);
    if found.pairs_disturbed == 0 {
        eprintln!("skipped: this process may not create a cgroup");
        return;
    }
    assert_eq!((found.pairs, found.pairs_disturbed), (0, 2));
    assert_eq!(again.status.code(), Some(5), "the targets answered");
}

/// Like [`build`], but every `n`-th VMM of the build ends at once.
fn failing_build(stage: &Stage, name: &str, n: u32) -> PathBuf {
    let dir = build(stage, name, "0", "b2sK");
    let count = dir.join("count");
    let script = format!(
        "#!/bin/sh\nexec 9>>{count}.lock; flock 9\nn=$(($(cat {count} 2>/dev/null || echo 0) + 1)); echo $n >{count}\n\
         exec 9>&-\n[ $((n % {n})) = 0 ] && exit 1\nexec {}\n",
        Stage::vmm().display(),
        count = count.display(),
    );
    fs::write(dir.join("bin/cube-vmm"), script).unwrap();
    dir
}

#[test]
fn a_slowdown_of_15_percent_is_found() {
    let Some(stage) = Stage::set() else { return };
    // The delay is most of a start, so its growth is 15 % less the rest of the start.
    let a = build(&stage, "a", "0.2", "b2sK");
    let b = build(&stage, "b", "0.235", "b2sK");
    let output = ab(
        &stage,
        &a,
        &b,
        &["--blocks", "12", "--starts", "4", "--tolerance", "5"],
    );
    let found = report(&output);
    assert_eq!(output.status.code(), Some(3), "{found:#?}");
    let of = |name: &str| found.metrics.iter().find(|m| m.metric == name).unwrap();
    let first_exec = of("first_exec.p50");
    assert_eq!(first_exec.verdict, Finding::Worse, "{first_exec:?}");
    let [low, _] = first_exec.ratio_ci95.unwrap();
    assert!(low > 1.0, "{first_exec:?}");
    assert_eq!(found.counts[0].b, 0, "{:?}", found.counts[0]);
}

#[test]
fn failures_of_2_percent_are_found() {
    let Some(stage) = Stage::set() else { return };
    let a = build(&stage, "a", "0", "b2sK");
    let b = failing_build(&stage, "b", 50);
    let output = ab(&stage, &a, &b, &["--blocks", "6", "--starts", "80"]);
    let found = report(&output);
    assert_eq!(output.status.code(), Some(3), "{found:#?}");
    let failures = &found.counts[0];
    assert_eq!(
        (failures.a, failures.a_n, failures.b_n),
        (0, 480, 480),
        "{failures:?}"
    );
    assert!((9..=10).contains(&failures.b), "{failures:?}");
    assert_eq!(failures.verdict, Finding::Worse, "{failures:?}");
}
