//! Reads the output of `strace -f -y -xx`.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// Arguments of strace that record what a [`crate::Recording`] needs. Programs that the traced program executes are not
/// traced.
pub const TRACED: [&str; 9] = [
    "-f",
    "-b",
    "execve",
    "-y",
    "-xx",
    "-s",
    "1048576",
    "-e",
    "trace=openat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,write,pwrite64,fsync,\
     fdatasync,ftruncate",
];

/// A line of the trace that cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub struct TraceError(pub String);

/// The effect of a system call. Paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A file was opened and, unless it existed, created.
    Open {
        path: PathBuf,
        truncates: bool,
    },
    MakeDir(PathBuf),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    /// Bytes at an offset; `None`: at the end.
    Write(PathBuf, Option<usize>, Vec<u8>),
    Sync(PathBuf),
}

/// The steps of all successful calls, in the order in which they ended.
pub(crate) fn steps(trace: &str) -> Result<Vec<Step>, TraceError> {
    let mut unfinished = HashMap::new();
    let mut steps = Vec::new();
    for line in trace.lines() {
        let Some((pid, rest)) = line.split_once(' ') else {
            continue;
        };
        let rest = rest.trim_start();
        if let Some(begin) = rest.strip_suffix(" <unfinished ...>") {
            unfinished.insert(pid.to_owned(), begin.to_owned());
            continue;
        }
        let call = match rest.strip_prefix("<... ") {
            Some(resumed) => {
                let begin = unfinished.remove(pid);
                let end = resumed.split_once(" resumed>");
                match (begin, end) {
                    (Some(begin), Some((_, end))) => format!("{begin}{end}"),
                    _ => return Err(TraceError(line.to_owned())),
                }
            }
            None => rest.to_owned(),
        };
        steps.extend(step(&call).map_err(|()| TraceError(call))?);
    }
    Ok(steps)
}

/// The step of one call, `name(arguments) = result`. `None` if the call failed, or the line is about a signal or an
/// exit.
fn step(call: &str) -> Result<Option<Step>, ()> {
    if call.starts_with("+++") || call.starts_with("---") {
        return Ok(None);
    }
    let (call, result) = call.rsplit_once(" = ").ok_or(())?;
    if result.starts_with('-') || result.starts_with('?') {
        return Ok(None);
    }
    let (name, arguments) = call.trim_end().split_once('(').ok_or(())?;
    let arguments = arguments.strip_suffix(')').ok_or(())?;
    // With -xx, no string contains a comma or a space.
    let words: Vec<&str> = arguments.split(", ").collect();
    let word = |n: usize| words.get(n).copied().ok_or(());
    // A path without a directory, or relative to the directory before it.
    let plain = |n: usize| Ok(PathBuf::from(quoted(word(n)?)?));
    let at = |n: usize| Ok(PathBuf::from(of_fd(word(n)?)?).join(quoted(word(n + 1)?)?));
    let is_deleted = |n: usize| word(n).map(|w| w.ends_with("(deleted)"));
    let step = match name {
        "openat" => {
            let flags = word(2)?;
            if !flags.contains("O_CREAT") {
                return Ok(None);
            }
            Step::Open {
                path: at(0)?,
                truncates: flags.contains("O_TRUNC"),
            }
        }
        "mkdir" => Step::MakeDir(plain(0)?),
        "mkdirat" => Step::MakeDir(at(0)?),
        "unlink" | "rmdir" => Step::Remove(plain(0)?),
        "unlinkat" => Step::Remove(at(0)?),
        "rename" => Step::Rename(plain(0)?, plain(1)?),
        "renameat" | "renameat2" => Step::Rename(at(0)?, at(2)?),
        "link" => Step::Link(plain(0)?, plain(1)?),
        "linkat" => Step::Link(at(0)?, at(2)?),
        "write" | "pwrite64" | "fsync" | "fdatasync" | "ftruncate" if is_deleted(0)? => {
            return Ok(None);
        }
        "write" if of_fd(word(0)?).is_err() => return Ok(None),
        "write" => Step::Write(of_fd(word(0)?)?.into(), None, bytes(word(1)?)?),
        "pwrite64" => {
            let offset = word(3)?.parse().map_err(|_| ())?;
            Step::Write(of_fd(word(0)?)?.into(), Some(offset), bytes(word(1)?)?)
        }
        "fsync" | "fdatasync" => Step::Sync(of_fd(word(0)?)?.into()),
        _ => return Ok(None),
    };
    Ok(Some(step))
}

/// The path in `12<path>` or `AT_FDCWD<path>`.
fn of_fd(word: &str) -> Result<String, ()> {
    let (_, path) = word.split_once('<').ok_or(())?;
    let path = path.strip_suffix('>').ok_or(())?;
    String::from_utf8(unescaped(path)?).map_err(|_| ())
}

fn quoted(word: &str) -> Result<String, ()> {
    String::from_utf8(bytes(word)?).map_err(|_| ())
}

/// A quoted string. A string that strace has truncated is an error.
fn bytes(word: &str) -> Result<Vec<u8>, ()> {
    let inner = word.strip_prefix('"').and_then(|w| w.strip_suffix('"'));
    unescaped(inner.ok_or(())?)
}

fn unescaped(text: &str) -> Result<Vec<u8>, ()> {
    if !text.starts_with("\\x") {
        return Ok(text.as_bytes().to_vec());
    }
    let hex = text.split("\\x").skip(1);
    hex.map(|byte| u8::from_str_radix(byte, 16).map_err(|_| ()))
        .collect()
}

/// The part of a path below `root`.
pub(crate) fn below(path: &Path, root: &Path) -> Option<PathBuf> {
    path.strip_prefix(root).ok().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_in_the_order_in_which_they_end() {
        let trace = r#"7 mkdir("\x2f\x61", 0700) = 0
7 openat(AT_FDCWD<\x2f>, "\x61\x2f\x62", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0600) = 3<\x2f\x61\x2f\x62>
7 fsync(3<\x2f\x61\x2f\x62> <unfinished ...>
8 write(3<\x2f\x61\x2f\x62>, "\x7b\x7d", 2) = 2
8 rename("\x2f\x61\x2f\x62", "\x2f\x61\x2f\x63") = -1 ENOENT (No such file or directory)
7 <... fsync resumed>) = 0
8 unlinkat(4<\x2f\x61>, "\x62", 0) = 0
8 +++ exited with 0 +++
"#;
        let file = PathBuf::from("/a/b");
        let wanted = [
            Step::MakeDir("/a".into()),
            Step::Open {
                path: file.clone(),
                truncates: false,
            },
            Step::Write(file.clone(), None, b"{}".to_vec()),
            Step::Sync(file.clone()),
            Step::Remove(file),
        ];
        assert_eq!(steps(trace).unwrap(), wanted);
        assert!(steps(r#"7 write(3<\x61>, "\x61"..., 2) = 2"#).is_err());
    }
}
