//! Paths as callers write them.

use std::path::{Component, Path, PathBuf};

use super::failure::FileError;

/// Resolves a caller's path to an absolute one. Relative paths and `~` start in the home directory; an empty path means
/// `workdir`, or the home directory if that is empty too. In a relative path, `..` is removed as text; in any other
/// path it is left to the kernel, which follows links first.
///
/// # Errors
/// Returns status 400 if the path has a zero byte or names another user's home (`~name`).
pub(crate) fn resolve(path: &str, workdir: &str, home: &str) -> Result<PathBuf, FileError> {
    let home = if home.is_empty() { "/" } else { home };
    let path = match (path, workdir) {
        ("", "") => home,
        ("", workdir) => workdir,
        (path, _) => path,
    };
    if path.contains('\0') {
        return Err(FileError::new(400, "a path contains a zero byte"));
    }
    let full = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        Some(_) => {
            let message = "cannot expand user-specific home dir";
            return Err(FileError::new(400, message));
        }
        None if path.starts_with('/') => path.to_owned(),
        None => return Ok(tidy(&Path::new(home).join(path))),
    };
    // `components` drops double slashes, single dots and a trailing slash.
    Ok(Path::new(&full).components().collect())
}

/// Removes `..` as text, without following links.
fn tidy(path: &Path) -> PathBuf {
    let mut tidy = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => tidy.push(name),
            Component::ParentDir => {
                tidy.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    tidy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved() {
        let resolved = |path| resolve(path, "/work", "/home/user").unwrap();
        assert_eq!(resolved("/a//b/./c/"), Path::new("/a/b/c"));
        assert_eq!(resolved("/a/../b"), Path::new("/a/../b"));
        assert_eq!(resolved("x/./y/../z"), Path::new("/home/user/x/z"));
        assert_eq!(resolved("../../.."), Path::new("/"));
        assert_eq!(resolved("~/x"), Path::new("/home/user/x"));
        assert_eq!(resolved("~"), Path::new("/home/user"));
        assert_eq!(resolved(""), Path::new("/work"));
        let homeless = |path, workdir| resolve(path, workdir, "").unwrap();
        assert_eq!(homeless("", ""), Path::new("/"));
        assert_eq!(homeless("x", "work"), Path::new("/x"));
        assert_eq!(homeless("", "work"), Path::new("/work"));
        assert!(resolve("~x", "/", "/").is_err());
        assert!(resolve("a\0b", "/", "/").is_err());
    }
}
