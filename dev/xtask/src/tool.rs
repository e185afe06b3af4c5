//! Runs external programs. The error for a failed program shows the end of its output.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// Lines of a failed program's output in the error message.
const LINES_SHOWN: usize = 30;

/// Runs a program and appends its output to `log`.
pub(crate) fn run(command: &mut Command, log: &Path) -> Result<()> {
    let mut file = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(log)
        .with_context(|| format!("cannot open {}", log.display()))?;
    writeln!(file, "+ {command:?}")?;
    let name = name(command);
    let status = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} failed with {status}:\n{}", last_lines(log));
    }
    Ok(())
}

/// Runs a program and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = name(command);
    let done = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {name}"))?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        bail!("{name} failed with {}: {}", done.status, stderr.trim());
    }
    String::from_utf8(done.stdout)
        .with_context(|| format!("the output of {name} is not valid UTF-8"))
}

/// Runs a program with `input` on its standard input and returns its standard output.
pub(crate) fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    let name = name(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let stdin = child.stdin.take();
    let done = std::thread::scope(|scope| {
        // An error here means that the program stopped reading: its exit status gives the reason.
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(input)));
        child.wait_with_output()
    })?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        bail!("{name} failed with {}: {}", done.status, stderr.trim());
    }
    Ok(done.stdout)
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// The last lines of a text file. Empty if the file cannot be read.
pub(crate) fn last_lines(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_failed_program_shows_the_end_of_its_output() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "seq 100; exit 3"]);
        let error = run(&mut command, log.path()).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("\n100"));
        assert!(!error.contains("\n50\n"));
    }

    #[test]
    fn a_filter_accepts_more_input_than_a_pipe_holds() {
        let input = vec![7; 1 << 20];
        assert_eq!(filter(&mut Command::new("cat"), &input).unwrap(), input);
        assert!(filter(&mut Command::new("false"), &input).is_err());
    }
}
