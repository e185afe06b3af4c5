//! The options file of `cube-api serve --config FILE`: one option of the command per line, without its dashes.
//!
//! ```text
//! # A comment.
//! max-sandboxes = 64
//! insecure-loopback
//! ```
//! The lines stand in the command line in the place of `--config FILE`, so a reload, which repeats the command line, reads
//! the file anew.

use std::{
    ffi::OsString,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use super::Failure;

const OPTION: &str = "--config";
const MAX_FILE: u64 = 1 << 20;

/// Replaces `--config FILE` by the options in the file.
///
/// # Errors
/// Returns an error if the file cannot be read or a line is no option.
pub(super) fn expand(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<OsString>, Failure> {
    let mut expanded = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let file = if text == OPTION {
            let file = arguments.next();
            file.ok_or_else(|| Failure::Usage(format!("{OPTION} needs the path of a file")))?
        } else if let Some(file) = text.strip_prefix("--config=") {
            file.into()
        } else {
            expanded.push(argument);
            continue;
        };
        expanded.extend(read(&PathBuf::from(file))?);
    }
    Ok(expanded)
}

fn read(path: &Path) -> Result<Vec<OsString>, Failure> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_string(&mut text));
    read.map_err(|why| Failure::Usage(format!("{OPTION} {}: {why}", path.display())))?;
    let mut options = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let option = option(line).map_err(|why| {
            let at = format!("{}, line {}", path.display(), number + 1);
            Failure::Usage(format!("{at}: {why}"))
        })?;
        options.extend(option.map(OsString::from));
    }
    Ok(options)
}

/// The option in a line. `None`: the line is empty or a comment.
fn option(line: &str) -> Result<Option<String>, String> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let (name, value) = match line.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (line, None),
    };
    let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
        && (name.chars()).all(|c| c.is_ascii_lowercase() || c == '-');
    if !is_name || name == "config" {
        return Err(format!(
            "{line:?} is not an option: write `name = value` as in `max-sandboxes = 64`, or the name alone if it has no value"
        ));
    }
    Ok(Some(match value {
        Some(value) => format!("--{name}={value}"),
        None => format!("--{name}"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments = arguments.iter().map(OsString::from);
        let all = expand(arguments).map_err(|why| why.to_string())?;
        Ok(all.iter().map(|a| a.to_string_lossy().into()).collect())
    }

    #[test]
    fn the_lines_of_the_file_stand_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.conf");
        let text = "# comment\n\n  max-sandboxes = 64\ninsecure-loopback\nimage-mirror = a=http://b?c=d\ndomain=\n";
        std::fs::write(&path, text).unwrap();
        let name = path.to_str().unwrap();
        let options = [
            "--max-sandboxes=64",
            "--insecure-loopback",
            "--image-mirror=a=http://b?c=d",
            "--domain=",
        ];
        let expected: Vec<_> = ["serve"]
            .iter()
            .chain(&options)
            .chain(&["--rate"])
            .collect();
        assert_eq!(
            expanded(&["serve", "--config", name, "--rate"]).unwrap(),
            expected.iter().map(ToString::to_string).collect::<Vec<_>>()
        );
        let joined = format!("--config={name}");
        assert_eq!(expanded(&[&joined]).unwrap(), options);
    }

    #[test]
    fn a_line_that_is_no_option_is_refused_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.conf");
        for wrong in [
            "--rate 5",
            "max sandboxes = 1",
            "= 5",
            "config = /x",
            "-v",
            "Rate = 1",
        ] {
            std::fs::write(&path, format!("rate = 1\n{wrong}\n")).unwrap();
            let why = expanded(&["--config", path.to_str().unwrap()]).unwrap_err();
            assert!(
                why.contains("server.conf, line 2") && why.contains(wrong),
                "{why}"
            );
        }
        assert!(
            expanded(&["--config", "/no/such/file"])
                .unwrap_err()
                .contains("/no/such/file")
        );
        assert!(
            expanded(&["--config"])
                .unwrap_err()
                .contains("path of a file")
        );
    }
}
