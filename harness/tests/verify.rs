//! `cube-bench verify` executes the `cube-verify` in its own directory.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    process::{Command, Output, Stdio},
};

/// Prints its process id and its arguments.
const STAND_IN: &str = r#"#!/bin/sh
printf %s $$
for word; do printf '|%s' "$word"; done
echo
[ "$1" != signal ] || kill $$
exit 4
"#;

#[test]
fn verify_is_cube_verify_with_the_same_arguments_process_and_exit_code() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bench = dir.path().join("cube-bench");
    fs::hard_link(env!("CARGO_BIN_EXE_cube-bench"), &bench).unwrap();
    let run = |words: &[&str]| -> (u32, Output) {
        let mut command = Command::new(&bench);
        command.args(words).stdout(Stdio::piped());
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        (child.id(), child.wait_with_output().unwrap())
    };

    let (_, missing) = run(&["verify", "isolation"]);
    let error = String::from_utf8(missing.stderr).unwrap();
    let path = dir.path().join("cube-verify");
    assert_eq!(missing.status.code(), Some(7), "{error}");
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert!(error.contains("cargo xtask prepare"), "{error}");

    fs::write(&path, STAND_IN).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    for words in [
        &["verify"][..],
        &["verify", "--help"],
        &["verify", "isolation", "--case", "a b", "--", "-x"],
        &["help", "verify", "isolation"],
    ] {
        let (pid, done) = run(words);
        let passed = words.iter().filter(|word| **word != "verify");
        let expected: String = passed.map(|word| format!("|{word}")).collect();
        let expected = format!("{pid}{expected}\n");
        assert_eq!(String::from_utf8(done.stdout).unwrap(), expected);
        assert_eq!(done.status.code(), Some(4));
    }
    assert_eq!(run(&["verify", "signal"]).1.status.signal(), Some(15));
}
