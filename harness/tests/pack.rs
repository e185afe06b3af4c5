//! Recorded runs for others: packs, the submission checker, badges and the board.
#![expect(
    clippy::unwrap_used,
    reason = "a run that cannot be written should stop the test"
)]

#[path = "support/recorded.rs"]
mod recorded;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use harness::{
    host::facts::{self, ENVIRONMENT_FILE},
    record::{EVENTS_FILE, Recorder},
    report,
    session::RecordedRun,
};

fn bench(args: &[&str]) -> Output {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_cube-bench"));
    bench.env_remove("CI").args(args).output().unwrap()
}

/// Standard output of a check with this exit code.
fn checked(args: &[&str], code: i32) -> String {
    let output = bench(&[&["check"], args].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}{errors}");
    text
}

/// A directory with a complete run and its reports.
fn run(dir: &Path) -> PathBuf {
    let dir = dir.join("run");
    fs::create_dir(&dir).unwrap();
    let mut host = facts::read(Path::new("/no/such"));
    host.cpu_model = Some("Invented CPU".into());
    let host = serde_json::to_string(&host).unwrap();
    fs::write(dir.join(ENVIRONMENT_FILE), host).unwrap();
    fs::write(dir.join("adapter-target.stderr"), "a secret").unwrap();
    let mut recorder = Recorder::create(&dir).unwrap();
    for event in recorded::events(6) {
        recorder.append(&event).unwrap();
    }
    recorder.seal().unwrap();
    let recorded = RecordedRun::read(&dir).unwrap();
    for (name, text) in report::files(&recorded.view().unwrap()) {
        fs::write(dir.join(name), text).unwrap();
    }
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_pack_of_an_unchanged_run_has_no_fault() {
    let stage = tempfile::tempdir().unwrap();
    let run = run(stage.path());
    let pack = stage.path().join("run.tar.zst");
    let args = ["pack", text(&run), "-o", text(&pack)];
    assert_eq!(bench(&args).status.code(), Some(0));
    assert_eq!(bench(&args).status.code(), Some(2), "it exists");
    let found = checked(&[text(&pack)], 0);
    for line in [
        "4 files have the hashes in pack.json",
        "chained events up to ",
        "values of report.json follow from the events",
        "the run is complete",
        "open division: no shipped scenario is named \"recorded\"",
        "failures: 1 of 120 starts",
        "host graded ",
    ] {
        assert!(found.contains(line), "{line}: {found}");
    }
    assert!(!found.contains("FAULT") && !found.contains("unproven"));
    assert_eq!(
        checked(&[text(&run)], 0).lines().count() + 1,
        found.lines().count(),
        "a directory has no list of hashes"
    );
}

#[test]
fn changed_figures_events_and_hosts_are_faults() {
    let stage = tempfile::tempdir().unwrap();
    let run = run(stage.path());
    let changed = |name: &str, from: &str, to: &str, expected: &str| {
        let path = run.join(name);
        let original = fs::read_to_string(&path).unwrap();
        assert!(original.contains(from), "{name} contains {from}");
        fs::write(&path, original.replacen(from, to, 1)).unwrap();
        let found = checked(&[text(&run)], 3);
        assert!(found.contains(expected), "{expected}: {found}");
        fs::write(&path, original).unwrap();
    };
    changed(
        "report.json",
        "\"n\": 120",
        "\"n\": 121",
        "n is 121, the events give 120",
    );
    changed(
        "report.json",
        "\"verdict\": \"missed\"",
        "\"verdict\": \"met\"",
        "verdict is \"met\", the events give \"missed\"",
    );
    changed(EVENTS_FILE, "60000000", "50000000", "carry the hash");
    changed(
        ENVIRONMENT_FILE,
        "Invented",
        "Faster",
        "was changed after the run",
    );
    checked(&[text(&run)], 0);
    fs::remove_file(run.join("manifest.json")).unwrap();
    let found = checked(&[text(&run)], 5);
    assert!(found.contains("unproven"), "{found}");
}

#[test]
fn a_published_run_of_the_old_format_is_unproven_and_in_a_division() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    let run = results.join("single-api-ring3-2core-20261124");
    let found = checked(&[text(&run)], 5);
    assert!(found.contains("carry no hashes (format 1)"), "{found}");
    assert!(found.contains(" division: "), "{found}");
}

#[test]
fn only_a_signature_by_an_allowed_signer_over_these_files_counts() {
    let stage = tempfile::tempdir().unwrap();
    let run = run(stage.path());
    let path = |name: &str| stage.path().join(name);
    let key = |name: &str| {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]);
        let made = keygen.arg(path(name)).status();
        made.is_ok_and(|status| status.success())
    };
    if !key("mine") || !key("other") {
        eprintln!("skipped: no ssh-keygen");
        return;
    }
    let public = fs::read_to_string(path("mine.pub")).unwrap();
    let signers = path("signers");
    fs::write(&signers, format!("me@example.com {public}")).unwrap();
    let pack = |name: &str, key: Option<&str>| {
        let out = path(name);
        let key = key.map(path);
        harness::pack::write(&run, &out, key.as_deref()).unwrap();
        out
    };
    let with = |pack: &Path, code| checked(&[text(pack), "--signers", text(&signers)], code);
    let mine = pack("mine.tar.zst", Some("mine"));
    assert!(with(&mine, 0).contains("signed by me@example.com"));
    assert!(checked(&[text(&mine)], 0).contains("--signers FILE verifies"));
    let other = pack("other.tar.zst", Some("other"));
    assert!(with(&other, 3).contains("no allowed signer has signed this"));
    let none = pack("none.tar.zst", None);
    assert!(with(&none, 3).contains("FAULT     not signed"));
    // Another list under the same signature.
    let dir = path("unpacked");
    fs::create_dir(&dir).unwrap();
    harness::pack::unpack(&mine, &dir).unwrap();
    assert!(!dir.join("adapter-target.stderr").exists());
    let list = fs::read_to_string(dir.join("pack.json")).unwrap();
    fs::write(dir.join("pack.json"), list + "\n").unwrap();
    assert!(with(&dir, 3).contains("no allowed signer has signed this"));
}

#[test]
fn an_archive_with_foreign_entries_is_refused() {
    let stage = tempfile::tempdir().unwrap();
    let file = stage.path().join("evil.tar.zst");
    for name in ["../report.json", "a/report.json", "passwd", "report.json/"] {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(1);
        header.set_cksum();
        builder.append(&header, &b"x"[..]).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let archive = builder.into_inner().unwrap();
        let archive = ruzstd::encoding::compress_to_vec(archive.as_slice(), level);
        fs::write(&file, archive).unwrap();
        let output = bench(&["check", text(&file)]);
        assert_eq!(output.status.code(), Some(2), "{name}");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(why.contains("nor a pack: it contains"), "{why}");
    }
    let empty = bench(&["check", text(stage.path())]);
    assert_eq!(empty.status.code(), Some(2));
}

#[test]
fn a_badge_shows_value_interval_host_and_date() {
    let stage = tempfile::tempdir().unwrap();
    let run = run(stage.path());
    let out = stage.path().join("x.svg");
    let badge = |figure: &str| {
        let args = ["badge", text(&run), "--figure", figure, "-o", text(&out)];
        bench(&args).status.code()
    };
    assert_eq!(badge("first_exec.p95"), Some(0));
    let svg = fs::read_to_string(&out).unwrap();
    for part in [
        "recorded first exec P95",
        "51.17 ms (95 %: 49.01 ms to 53.42 ms), n = 120",
        "Invented CPU",
        "2023-11-14",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    assert!(!svg.contains("href") && !svg.contains("<script"));
    assert_eq!(badge("memory.slope"), Some(0));
    assert!(fs::read_to_string(&out).unwrap().contains("2.605 MB"));
    assert_eq!(badge("first_exec.p42"), Some(2));
}

#[test]
fn the_board_has_a_row_for_each_run_with_division_and_record() {
    let stage = tempfile::tempdir().unwrap();
    let run = run(stage.path());
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    let published = results.join("single-api-ring3-2core-20261124");
    let out = stage.path().join("board.html");
    let args = ["board", text(&run), text(&published), "--out", text(&out)];
    assert_eq!(bench(&args).status.code(), Some(0));
    let page = fs::read_to_string(&out).unwrap();
    for part in [
        "2 recorded runs",
        "Invented CPU",
        "id=\"single-api\"",
        "id=\"recorded\"",
        "first output, cold",
        "MemAvailable lost per additional sandbox",
        "39.10 / 51.17 (49.01–53.42)",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("<script"));
}
