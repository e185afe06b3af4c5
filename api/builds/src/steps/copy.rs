//! COPY: `[source, destination, owner?, mode?]`, and the hash of an uploaded archive of the files.
//!
//! The client packs the files that match the source, with paths relative to its context. The archive is unpacked in the
//! guest, and the files of the source are moved to the destination as Docker does it.

use std::{
    fs::File,
    io::{self, Read, Seek},
    path::Path,
};

use rest::LogLevel;

use super::{Disk, Done, Place, StepError};
use crate::{
    command::{Command, expanded},
    settings::Settings,
};

const COPY: &str = include_str!("copy.sh");
const UNPACK: &str = r#"mkdir -p -- "$1" && tar "$2" "$3" -C "$1""#;
const REMOVE: &str = r#"rm -rf -- "$@""#;
/// The first bytes of gzip (RFC 1952, 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The checked arguments.
#[derive(Debug, PartialEq, Eq)]
struct Copy<'a> {
    /// Relative to the archive's root; empty for the root itself.
    source: String,
    target: &'a str,
    owner: String,
    /// Empty: unchanged from the archive.
    mode: &'a str,
}

pub(super) async fn perform(
    args: &[&str],
    hash: Option<&str>,
    place: &Place<'_>,
) -> Result<Done, StepError> {
    let copy = Copy::of(args, &place.settings.user)?;
    let hash = hash.ok_or_else(|| StepError::text("COPY requires files hash to be set"))?;
    let missing = || {
        let text = format!(
            "failed to open files object from storage: no files were uploaded for the hash {hash}"
        );
        StepError::Failed(text)
    };
    let archive = place.archive.as_deref().ok_or_else(missing)?;
    let unreadable = |error: io::Error| {
        StepError::Failed(format!("failed to open files object from storage: {error}"))
    };
    let (archive, extract) = open(archive).map_err(unreadable)?;
    let (packed, room) = (format!("/tmp/{hash}.tar"), format!("/tmp/{hash}"));
    let sent = place.guest.upload(archive, &packed).await;
    sent.map_err(StepError::of("failed to copy layer tar data to sandbox"))?;
    let unpacked = format!("{room}/unpack");
    let unpack = script(UNPACK, &[&unpacked, extract, &packed], place.settings);
    let unpack = place.run(&unpack, LogLevel::Debug).await;
    unpack.map_err(StepError::of("failed to extract files"))?;
    let command = copy.command(&unpacked, place.settings);
    let moved = place.run(&command, LogLevel::Info).await;
    moved.map_err(StepError::of("failed to move files in sandbox"))?;
    let remove = script(REMOVE, &[&packed, &room], place.settings);
    let removed = place.run(&remove, LogLevel::Debug).await;
    removed.map_err(StepError::of("failed to remove temporary files"))?;
    Ok(Done {
        settings: place.settings.clone(),
        disk: Disk::Changed,
    })
}

fn script(script: &str, args: &[&str], settings: &Settings) -> Command {
    Command::of_root(script, args, settings)
}

/// The archive, and the option with which tar reads it.
fn open(path: &Path) -> io::Result<(File, &'static str)> {
    let mut file = File::open(path)?;
    let mut magic = [0; GZIP.len()];
    let is_gzip = match file.read_exact(&mut magic) {
        Ok(()) => magic == GZIP,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(error),
    };
    file.rewind()?;
    Ok((file, if is_gzip { "-xzf" } else { "-xf" }))
}

impl<'a> Copy<'a> {
    fn of(args: &[&'a str], user: &str) -> Result<Self, StepError> {
        let [source, target, rest @ ..] = args else {
            let text = "COPY requires a local path and a container path argument";
            return Err(StepError::text(text));
        };
        let source = inside(without_pattern(source)).ok_or_else(|| {
            let text = format!("COPY source {source:?} is outside of the build's files");
            StepError::Failed(text)
        })?;
        let owner = match rest.first().filter(|owner| !owner.is_empty()) {
            None => format!("{user}:{user}"),
            Some(both) if both.contains(':') => (*both).to_owned(),
            Some(one) => format!("{one}:{one}"),
        };
        Ok(Self {
            source,
            target,
            owner,
            mode: rest.get(1).copied().unwrap_or_default(),
        })
    }

    fn command(&self, unpacked: &str, settings: &Settings) -> Command {
        let text = format!(
            "target={}\nowner={}\nmode={}\n{COPY}",
            expanded(self.target),
            expanded(&self.owner),
            expanded(self.mode)
        );
        let source = match self.source.as_str() {
            "" => unpacked.to_owned(),
            below => format!("{unpacked}/{below}"),
        };
        let workdir = settings.workdir.as_deref().unwrap_or_default();
        script(&text, &[&source, workdir, &settings.user], settings)
    }
}

/// The directory in which a client's pattern starts: the part before the first component with `*`, `?`, `[` or `{`. A
/// backslash escapes the next character.
fn without_pattern(source: &str) -> &str {
    let mut last_slash = None;
    let mut bytes = source.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            b'/' => last_slash = Some(at),
            b'*' | b'?' | b'[' | b'{' => {
                return last_slash.map_or("", |at| source.get(..at).unwrap_or_default());
            }
            _ => {}
        }
    }
    source
}

/// The path without `.`, `..` and empty components. `None` if it leaves its base directory.
fn inside(path: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_and_owners_are_read_as_e2b_does() {
        let of = |args: &[&'static str]| Copy::of(args, "user");
        for (given, source) in [
            ("/app/*.txt", "app"),
            ("/app/**/x", "app"),
            ("a?", ""),
            ("src/{a,b}/c", "src"),
            ("./local/path/", "local/path"),
            ("a/b", "a/b"),
            ("a/x\\[1]/*", "a/x\\[1]"),
            (".", ""),
        ] {
            assert_eq!(of(&[given, "/d"]).unwrap().source, source, "{given}");
        }
        assert_eq!(of(&["a", "b"]).unwrap().owner, "user:user");
        assert_eq!(of(&["a", "b", "", "0755"]).unwrap().mode, "0755");
        assert_eq!(of(&["a", "b", "root"]).unwrap().owner, "root:root");
        assert_eq!(of(&["a", "b", "root:x"]).unwrap().owner, "root:x");
        let few = "COPY requires a local path and a container path argument";
        assert_eq!(of(&["a"]).unwrap_err().to_string(), few);
        assert!(of(&["../a", "b"]).is_err() && of(&["a/../../b", "b"]).is_err());
    }
}
