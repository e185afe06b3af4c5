//! The figures in the documents match the published runs.
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

use harness::claims;
use support::Stage;

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Writes the list, and the same text as each of the documents with figures.
fn write_documents(dir: &Path, text: &str, list: &str) {
    fs::create_dir_all(dir.join("docs/measure")).unwrap();
    for name in ["README.md", "docs/measure/figures.md"] {
        fs::write(dir.join(name), text).unwrap();
    }
    fs::write(dir.join("claims.toml"), list).unwrap();
}

#[test]
fn every_published_figure_is_that_of_its_run() {
    let checked = claims::verify(&root()).unwrap();
    assert!(checked.wrong.is_empty(), "{}", checked.wrong.join("\n"));
    assert!(checked.figures >= 40, "{}", checked.figures);
}

#[test]
fn a_figure_changed_by_hand_is_found() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("results"), dir.path().join("results")).unwrap();
    let wrong_with = |measured: &str, goal: &str, text: &str, printed: &str| {
        let run = "code-interpreter-ring3-2core-20261122";
        let readme = format!(
            "<!-- figures -->\n| a | {measured} | {goal} | `{run}` |\n<!-- /figures -->\n| b | 7 | | `{run}` |\n"
        );
        let claims = format!(
            "[[claims]]\nfiles = [\"README.md\", \"docs/measure/figures.md\"]\ntext = \"{text}\"\nrun = \"{run}\"\n\
             values = [{{ printed = \"{printed}\", key = \"/phases/first_exec/p50_ms\" }}]\n"
        );
        write_documents(dir.path(), &readme, &claims);
        claims::verify(dir.path()).unwrap().wrong.join("\n")
    };
    let wrong = |measured: &str, text: &str, printed: &str| wrong_with(measured, "", text, printed);
    assert_eq!(wrong("2.3 ms", "2.3 ms", "2.3"), "");
    // In the document only: the listed text is gone, and the new figure is not listed.
    let in_document = wrong("1.9 ms", "2.3 ms", "2.3");
    assert!(in_document.contains("not in the document"), "{in_document}");
    for file in ["README.md", "docs/measure/figures.md"] {
        let unlisted = format!("{file}: 1.9 in \"1.9 ms\" is not in claims.toml");
        assert!(in_document.contains(&unlisted), "{in_document}");
    }
    // In both: the run disagrees.
    let in_both = wrong("1.9 ms", "1.9 ms", "1.9");
    assert!(
        in_both.contains("1.9 is printed, 2.349817 was measured"),
        "{in_both}"
    );
    // A figure next to the listed one.
    let beside = wrong("2.3 / 3.3 ms", "2.3 / 3.3 ms", "2.3");
    assert!(
        beside.contains("3.3 in \"2.3 / 3.3 ms\" is not in"),
        "{beside}"
    );
    // An unmarked miss.
    let missed = wrong_with("2.3 ms", "2 ms", "2.3 ms", "2.3");
    assert!(missed.contains("misses the goal"), "{missed}");
}

#[test]
fn a_document_that_lost_its_figures_is_found() {
    let dir = tempfile::tempdir().unwrap();
    write_documents(dir.path(), "No figures.\n", "claims = []\n");
    let wrong = claims::verify(dir.path()).unwrap().wrong;
    assert_eq!(wrong.len(), 2, "{wrong:?}");
    assert!(wrong[1].starts_with("docs/measure/figures.md has no figures"));
}

#[test]
fn the_figures_of_a_document_are_written_from_its_runs() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("results"), dir.path().join("results")).unwrap();
    let run = "code-interpreter-ring3-2core-20261122";
    let readme = format!("<!-- figures -->\n| a | 1.9 / 3.3 ms | | `{run}` |\n<!-- /figures -->\n");
    let claims = format!(
        "# A comment stays.\n\n[[claims]]\nfiles = [\"README.md\", \"docs/measure/figures.md\"]\ntext = \"1.9 / 3.3 ms\"\nrun = \"{run}\"\nvalues = [\n    \
         {{ printed = \"1.9\", key = \"/phases/first_exec/p50_ms\" }},\n    \
         {{ printed = \"3.3\", key = \"/phases/first_exec/p95_ms\" }},\n]\n"
    );
    write_documents(dir.path(), &readme, &claims);
    assert_eq!(claims::verify(dir.path()).unwrap().wrong.len(), 1);
    assert_eq!(claims::write(dir.path()).unwrap(), 1);
    for file in ["README.md", "docs/measure/figures.md"] {
        let written = fs::read_to_string(dir.path().join(file)).unwrap();
        assert!(written.contains("| 2.3 / 3.3 ms |"), "{file}: {written}");
    }
    let list = fs::read_to_string(dir.path().join("claims.toml")).unwrap();
    assert!(list.starts_with("# A comment stays."), "{list}");
    assert!(
        claims::verify(dir.path()).unwrap().wrong.is_empty(),
        "{list}"
    );
    assert_eq!(claims::write(dir.path()).unwrap(), 0);
}

#[test]
fn the_shown_report_is_that_of_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let page = "docs/measure/reading-reports.md";
    let text = fs::read_to_string(root().join(page)).unwrap();
    let shown = "memory of one more clone: 3.862 MB";
    assert!(text.contains(shown));
    for file in ["results", "claims.toml", "README.md"] {
        std::os::unix::fs::symlink(root().join(file), dir.path().join(file)).unwrap();
    }
    // A copy, because a page is changed below.
    let copied = Command::new("cp")
        .arg("-r")
        .args([root().join("docs"), dir.path().join("docs")])
        .status();
    assert!(copied.unwrap().success());
    let changed = text.replace(shown, "memory of one more clone: 2.838 MB");
    fs::write(dir.path().join(page), changed).unwrap();
    let wrong = claims::verify(dir.path()).unwrap().wrong;
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].contains("2.838 MB"), "{wrong:?}");
}

/// A VMM that sleeps before it starts. `fast` and `slow` are arguments of `sleep`: of every ten starts, the first
/// five are fast and the last five slow.
fn vmm(stage: &Stage, name: &str, fast: &str, slow: &str) -> PathBuf {
    let count = stage.dir.path().join(format!("{name}.count"));
    let script = format!(
        "#!/bin/sh\nexec 9>>{count}.lock; flock 9\nn=$(cat {count} 2>/dev/null || echo 0); echo $((n + 1)) >{count}\n\
         exec 9>&-\n[ $((n / 5 % 2)) = 0 ] && sleep {fast} || sleep {slow}\nexec {}\n",
        Stage::vmm().display(),
        count = count.display(),
    );
    let vmm = stage.dir.path().join(name);
    fs::write(&vmm, script).unwrap();
    fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755)).unwrap();
    vmm
}

#[test]
fn a_published_run_is_measured_again_and_a_drift_is_found() {
    // The median lies between fast and slow rounds, so its interval contains both, in every run of this VMM.
    const SCENARIO: &str = "rounds = 20\nwarmup_rounds = 0\n[arrival]\nkind = \"closed\"\nworkers = 5\nstarts = 5\n\
        [hold]\nuntil = \"exec\"\n[baseline]\nkind = \"none\"\n";
    const RUN: &str = "stand-in-2core-20261124";
    let Some(stage) = Stage::set() else { return };
    let same = vmm(&stage, "same", "0", "0.1");
    let published = stage.dir.path().join("results").join(RUN);
    let first = stage
        .command_of(SCENARIO, &same, &published)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&first.stderr);
    assert_eq!(first.status.code(), Some(0), "{stderr}");
    let figure = |key: &str| {
        let report: serde_json::Value =
            serde_json::from_slice(&fs::read(published.join("report.json")).unwrap()).unwrap();
        format!("{:.1}", report.pointer(key).unwrap().as_f64().unwrap())
    };
    let p50 = figure("/phases/first_exec/p50_ms");
    let readme = format!("<!-- figures -->\n| a | {p50} ms | | `{RUN}` |\n<!-- /figures -->\n");
    let list = format!(
        "[[claims]]\nfiles = [\"README.md\", \"docs/measure/figures.md\"]\ntext = \"{p50} ms\"\nrun = \"{RUN}\"\n\
         values = [{{ printed = \"{p50}\", key = \"/phases/first_exec/p50_ms\" }}]\n"
    );
    write_documents(stage.dir.path(), &readme, &list);
    let again = |vmm: &Path, only: &[&str]| -> Output {
        Command::new(env!("CARGO_BIN_EXE_cube-bench"))
            .args(["verify-claims", "--rerun"])
            .args(only)
            .arg("--root")
            .arg(stage.dir.path())
            .arg("--artifacts")
            .arg(stage.dir.path())
            .arg("--run-root")
            .arg(stage.run_root())
            .arg("--vmm")
            .arg(vmm)
            .output()
            .unwrap()
    };
    let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let agreed = again(&same, &[RUN]);
    assert!(
        text(&agreed).ends_with("1 figures agree, 0 drifted, 0 not compared\n"),
        "{}",
        text(&agreed)
    );
    assert_eq!(agreed.status.code(), Some(0));
    let slower = vmm(&stage, "slower", "0.6", "0.6");
    let drifted = again(&slower, &[]);
    assert_eq!(drifted.status.code(), Some(3), "{}", text(&drifted));
    assert!(
        text(&drifted).contains("measured again"),
        "{}",
        text(&drifted)
    );
    assert_eq!(again(&same, &["no-such-run"]).status.code(), Some(2));
}
