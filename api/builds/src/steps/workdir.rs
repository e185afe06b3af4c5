//! WORKDIR: `[path]`. Variables are expanded. A relative path extends the previous directory. Missing directories are
//! created and belong to the user.

use super::{Disk, Done, Place, StepError};
use crate::{command::expanded, settings::Settings};

/// Limit of Linux.
const MAX_PATH: usize = 4096;

pub(super) async fn perform(args: &[&str], place: &Place<'_>) -> Result<Done, StepError> {
    let Some(path) = args.first() else {
        return Err(StepError::text("WORKDIR requires a path argument"));
    };
    let settings = place.settings;
    let before = settings.workdir.as_deref().unwrap_or("/");
    let answer = place.ask(&script(path), &[before, &settings.user]).await;
    let answer = answer.map_err(StepError::of("failed to create workdir"))?;
    let (disk, workdir) = read(&answer)?;
    Ok(Done {
        settings: Settings {
            workdir: Some(workdir),
            ..settings.clone()
        },
        disk,
    })
}

fn script(path: &str) -> String {
    format!("target={}\n{}", expanded(path), include_str!("workdir.sh"))
}

/// Reads `made` or `found`, and the directory.
fn read(answer: &str) -> Result<(Disk, String), StepError> {
    let parts = answer.strip_suffix('\n').and_then(|a| a.split_once('\n'));
    let (disk, path) = match parts {
        Some(("made", path)) => (Disk::Changed, path),
        Some(("found", path)) => (Disk::Unchanged, path),
        _ => return Err(StepError::text("failed to save workdir")),
    };
    if !path.starts_with('/') || path.len() > MAX_PATH || path.contains('\0') {
        return Err(StepError::text("failed to save workdir"));
    }
    Ok((disk, path.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::Path};

    use super::*;

    /// Runs the script as the step does, with this test's user as the owner.
    fn workdir(path: &str, before: &Path) -> Result<(Disk, String), String> {
        let uid = fs::metadata("/proc/self").unwrap().uid().to_string();
        let before = before.to_str().unwrap();
        let output = std::process::Command::new("/bin/bash")
            .args(["-c", &script(path), "bash", before, &uid])
            .env("NAME", "of a variable")
            .output()
            .unwrap();
        if !output.status.success() {
            return Err(String::from_utf8(output.stderr).unwrap());
        }
        let answer = String::from_utf8(output.stdout).unwrap();
        read(&answer).map_err(|error| error.to_string())
    }

    #[test]
    fn directories_are_made_or_found_and_relative_ones_continue() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
        for (path, disk, found) in [
            ("a/b", Disk::Changed, at("a/b")),
            ("a/b", Disk::Unchanged, at("a/b")),
            ("a/./b/../c", Disk::Changed, at("a/c")),
            ("$NAME", Disk::Changed, at("of a variable")),
            ("-x", Disk::Changed, at("-x")),
            (".", Disk::Unchanged, root.to_str().unwrap().to_owned()),
            (&at("d e"), Disk::Changed, at("d e")),
        ] {
            assert_eq!(workdir(path, &root), Ok((disk, found)), "{path}");
        }
        fs::write(root.join("file"), "").unwrap();
        assert!(workdir("file", &root).is_err());
        assert!(workdir("file/below", &root).is_err());
    }

    #[test]
    fn answers_of_the_guest_are_checked() {
        for bad in [
            "",
            "found",
            "found\n",
            "made\nrelative\n",
            "other\n/a\n",
            "made\n/a",
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        let long = format!("made\n/{}\n", "a".repeat(MAX_PATH));
        assert!(read(&long).is_err());
        assert_eq!(read("made\n/a\nb\n").unwrap().1, "/a\nb");
    }
}
