//! Files of a COPY, and the hash by which the server recognizes them.

use std::{
    fs,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// Maximum number of files of one COPY.
const MAX_FILES: usize = 200_000;
const PIECE: usize = 256 << 10;

/// The files of a COPY.
#[derive(Debug)]
pub(super) struct Files {
    /// 64 hex digits; hash of the source, the destination, and names, modes and contents.
    pub(super) hash: String,
    pub(super) root: PathBuf,
    /// Relative to `root`, sorted. Directories precede their contents.
    pub(super) paths: Vec<PathBuf>,
}

/// Finds the files in a directory that match a source of a COPY. Ignored files are skipped.
pub(super) fn find(
    root: &Path,
    ignored: &Ignored,
    source: &str,
    to: &str,
) -> Result<Files, String> {
    let pattern = source
        .trim_start_matches("./")
        .trim_start_matches('/')
        .trim_end_matches('/');
    let parts: Vec<_> = pattern
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    if parts.contains(&"..") {
        return Err(format!("{source} is outside of the directory of the build"));
    }
    if let Some(why) = unsupported(pattern) {
        return Err(format!("{source} has {why}"));
    }
    let mut paths = Vec::new();
    let failed = |why: io::Error| format!("{source}: {why}");
    matching(root, Path::new(""), &parts, ignored, &mut paths).map_err(failed)?;
    if paths.is_empty() {
        return Err(format!(
            "{source} does not exist in {}, or is ignored",
            root.display()
        ));
    }
    paths.sort();
    paths.dedup();
    let hash = hash(root, source, to, &paths).map_err(failed)?;
    Ok(Files {
        hash,
        root: root.to_owned(),
        paths,
    })
}

/// Adds everything below a directory that matches the rest of a pattern.
fn matching(
    root: &Path,
    dir: &Path,
    parts: &[&str],
    ignored: &Ignored,
    found: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let Some((part, rest)) = parts.split_first() else {
        return whole(root, dir, ignored, found);
    };
    for name in names(&root.join(dir))? {
        let path = dir.join(&name);
        if !matches(part.as_bytes(), name.as_bytes()) || ignored.has_all(&path) {
            continue;
        }
        if rest.is_empty() {
            whole(root, &path, ignored, found)?;
            continue;
        }
        let kind = fs::symlink_metadata(root.join(&path))?;
        if kind.is_dir() {
            matching(root, &path, rest, ignored, found)?;
        } else if kind.is_symlink() && !ignored.has(&path) {
            // The link may lead out of the build context, to files that must not be uploaded by accident.
            let why = format!("{} is a link: name the directory itself", path.display());
            return Err(io::Error::other(why));
        }
    }
    Ok(())
}

/// Adds an entry and everything in it. An ignored directory is included if it contains an entry that is not
/// ignored.
fn whole(root: &Path, path: &Path, ignored: &Ignored, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if found.len() >= MAX_FILES {
        return Err(io::Error::other(format!("more than {MAX_FILES} files")));
    }
    let (before, is_root) = (found.len(), path.as_os_str().is_empty());
    if !is_root {
        found.push(path.to_owned());
    }
    if fs::symlink_metadata(root.join(path))?.is_dir() {
        for name in names(&root.join(path))? {
            let inside = path.join(name);
            if !ignored.has_all(&inside) {
                whole(root, &inside, ignored, found)?;
            }
        }
    }
    if !is_root && found.len() == before + 1 && ignored.has(path) {
        found.pop();
    }
    Ok(())
}

fn names(dir: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let entries = fs::read_dir(dir)?;
    entries.map(|entry| Ok(entry?.file_name())).collect()
}

/// The part of a pattern that [`matches`] cannot interpret as Docker does, with the remedy.
fn unsupported(pattern: &str) -> Option<&'static str> {
    pattern
        .contains(['[', '\\'])
        .then_some("[ or \\, which is not supported: write * or ? for the characters")
}

/// Whether a name matches a pattern with `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => {
            matches(rest, name)
                || name
                    .split_first()
                    .is_some_and(|(_, tail)| matches(pattern, tail))
        }
        (Some((b'?', rest)), Some((_, tail))) => matches(rest, tail),
        (Some((a, rest)), Some((b, tail))) if a == b => matches(rest, tail),
        _ => false,
    }
}

/// The patterns of `.dockerignore`, and whether each one is an exception to earlier ones.
#[derive(Debug, Default)]
pub(super) struct Ignored(Vec<(Vec<String>, bool)>);

impl Ignored {
    /// Reads a file of patterns. `None`: the file does not exist.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Self::parse(&text?).map(Some).map_err(io::Error::other),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).zip(1..);
        let lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
        let patterns = lines.map(|(line, number)| {
            if let Some(why) = unsupported(line) {
                return Err(format!("line {number} has {why}"));
            }
            let (line, takes_back) = match line.strip_prefix('!') {
                Some(rest) => (rest, true),
                None => (line, false),
            };
            let parts = line
                .split('/')
                .filter(|part| !part.is_empty() && *part != ".");
            Ok((parts.map(str::to_owned).collect(), takes_back))
        });
        Ok(Self(patterns.collect::<Result<_, _>>()?))
    }

    /// The last matching pattern decides. A pattern also covers everything below its matches.
    fn has(&self, path: &Path) -> bool {
        let parts: Vec<_> = path.iter().map(OsStrExt::as_bytes).collect();
        let last = self
            .0
            .iter()
            .rev()
            .find(|(pattern, _)| names_path(pattern, &parts));
        last.is_some_and(|(_, takes_back)| !takes_back)
    }

    /// Whether an entry is ignored together with everything that it may contain.
    fn has_all(&self, path: &Path) -> bool {
        self.has(path) && !self.0.iter().any(|(_, takes_back)| *takes_back)
    }
}

fn names_path(pattern: &[String], path: &[&[u8]]) -> bool {
    match pattern.split_first() {
        None => true,
        Some((first, rest)) if first == "**" => {
            (0..=path.len())
                .any(|skipped| names_path(rest, path.get(skipped..).unwrap_or_default()))
                && !path.is_empty()
        }
        Some((first, rest)) => path
            .split_first()
            .is_some_and(|(name, tail)| matches(first.as_bytes(), name) && names_path(rest, tail)),
    }
}

fn hash(root: &Path, source: &str, to: &str, paths: &[PathBuf]) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("COPY {source} {to}"));
    let mut piece = vec![0; PIECE];
    for path in paths {
        let full = root.join(path);
        let found = fs::symlink_metadata(&full)?;
        hash.update(path.as_os_str().as_bytes());
        hash.update(format!("\0{} {}\0", found.mode(), found.len()));
        if found.is_symlink() {
            hash.update(fs::read_link(&full)?.as_os_str().as_bytes());
        } else if found.is_file() {
            let mut file = fs::File::open(&full)?;
            loop {
                let read = file.read(&mut piece)?;
                if read == 0 {
                    break;
                }
                hash.update(piece.get(..read).unwrap_or_default());
            }
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_patterns() {
        for (pattern, name, is_match) in [
            ("*.py", "a.py", true),
            ("*.py", "a.pyc", false),
            ("a?c", "abc", true),
            ("*", "", true),
            ("a*b*c", "axbxc", true),
            ("a*b*c", "axb", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                is_match,
                "{pattern} {name}"
            );
        }
    }

    #[test]
    fn ignored_are_what_the_last_pattern_names() {
        let ignored =
            Ignored::parse("# c\nnode_modules\n**/*.log\n!keep.log\nsub/*.txt\n").unwrap();
        for (path, is_ignored) in [
            ("node_modules/x/y", true),
            ("a/node_modules", false),
            ("x.log", true),
            ("a/b/x.log", true),
            ("keep.log", false),
            ("sub/a.txt", true),
            ("a.txt", false),
        ] {
            assert_eq!(ignored.has(Path::new(path)), is_ignored, "{path}");
        }
        assert!(Ignored::parse("a\n[ab]").unwrap_err().contains("line 2"));
    }

    #[test]
    fn what_is_taken_back_below_an_ignored_directory_is_found() {
        let dir = tempfile::tempdir().unwrap();
        for file in ["a/b/keep", "a/b/drop", "a/c/drop", "d"] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let ignored = Ignored::parse("*\n!a/b/keep\n").unwrap();
        let found =
            |source: &str| find(dir.path(), &ignored, source, "/x").map(|files| files.paths);
        let kept = ["a", "a/b", "a/b/keep"].map(PathBuf::from);
        for source in [".", "a", "*"] {
            assert_eq!(found(source).unwrap(), kept, "{source}");
        }
        assert_eq!(found("a/b").unwrap(), kept[1..]);
        assert!(found("d").is_err() && found("a/c").is_err());
    }

    #[test]
    fn a_link_leads_nowhere() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("secret"), "s").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        for source in ["link/secret", "link/*", "*/secret"] {
            let why = find(dir.path(), &Ignored::default(), source, "/x").unwrap_err();
            assert!(why.contains("is a link"), "{why}");
        }
        // The link itself is copied as one.
        let found = find(dir.path(), &Ignored::default(), "link", "/x").unwrap();
        assert_eq!(found.paths, [PathBuf::from("link")]);
    }

    #[test]
    fn the_hash_changes_with_content_and_destination() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "1").unwrap();
        let first = find(dir.path(), &Ignored::default(), "a", "/x")
            .unwrap()
            .hash;
        assert_eq!(
            find(dir.path(), &Ignored::default(), "./a", "/x")
                .unwrap()
                .paths,
            [PathBuf::from("a")]
        );
        assert_ne!(
            find(dir.path(), &Ignored::default(), "a", "/y")
                .unwrap()
                .hash,
            first
        );
        fs::write(dir.path().join("a"), "2").unwrap();
        assert_ne!(
            find(dir.path(), &Ignored::default(), "a", "/x")
                .unwrap()
                .hash,
            first
        );
        assert_eq!(first.len(), 64);
    }
}
