//! Metadata that callers attach to files, stored as extended attributes with the prefix `user.e2b.`.
//!
//! Any program in the guest may set such attributes too, so reading is bounded and skips values that are not UTF-8.

use std::{collections::BTreeMap, fs::File, io, path::Path};

use rustix::{fs as sys, io::Errno};

/// Prefix of each key.
const PREFIX: &str = "user.e2b.";
/// Longest name of an attribute in bytes, including its prefix (xattr(7)).
const MAX_NAME: usize = 255;
/// Largest total of names and values in bytes: one block of ext4.
const MAX_TOTAL: usize = 4096;
/// Largest total size in bytes of the names and values that are read from a file; the rest is skipped.
const MAX_READ: usize = 64 << 10;

/// Metadata: keys and values.
pub(crate) type Metadata = BTreeMap<String, String>;

/// Checks whether a file can carry the metadata.
///
/// # Errors
/// Returns a message that names the invalid key, or the total size if that is too large.
pub(crate) fn check(metadata: &Metadata) -> Result<(), String> {
    let printable = |text: &str| text.bytes().all(|b| (0x20..0x7f).contains(&b));
    let mut total = 0;
    for (key, value) in metadata {
        if key.is_empty() || PREFIX.len() + key.len() > MAX_NAME {
            return Err(format!("metadata key '{key:.32}' is empty or too long"));
        }
        if !printable(key) || !printable(value) {
            return Err(format!("metadata '{key}' is not printable ASCII"));
        }
        total += PREFIX.len() + key.len() + value.len();
    }
    match total {
        0..=MAX_TOTAL => Ok(()),
        _ => Err(format!("{total} bytes of metadata exceed {MAX_TOTAL}")),
    }
}

/// Reads the metadata of a file, following links. Empty if there is none or it cannot be read: not all file systems
/// have extended attributes.
pub(crate) fn read(path: &Path) -> Metadata {
    // Most files have no attributes, and then nothing is allocated.
    let mut few = [0; 512];
    let names = match sys::listxattr(path, &mut few[..]) {
        Ok(len) => few.get(..len).unwrap_or_default().to_vec(),
        Err(Errno::RANGE) => {
            let mut many = vec![0; MAX_READ];
            let len = sys::listxattr(path, &mut many[..]).unwrap_or(0);
            many.truncate(len);
            many
        }
        Err(_) => return Metadata::new(),
    };
    let (mut metadata, mut total, mut space) = (Metadata::new(), 0, Vec::new());
    for name in ours(&names) {
        space.resize(MAX_READ, 0);
        let Ok(len) = sys::getxattr(path, name, &mut space[..]) else {
            continue;
        };
        total += name.len() + len;
        if total > MAX_READ {
            break;
        }
        if let Ok(value) = std::str::from_utf8(space.get(..len).unwrap_or_default()) {
            metadata.insert(name[PREFIX.len()..].to_owned(), value.to_owned());
        }
    }
    metadata
}

/// The names that begin with [`PREFIX`] and are UTF-8, in a list of attribute names that each end with a zero byte.
fn ours(names: &[u8]) -> impl Iterator<Item = &str> {
    let names = names.split(|b| *b == 0);
    let names = names.filter_map(|name| std::str::from_utf8(name).ok());
    names.filter(|name| name.starts_with(PREFIX))
}

/// Replaces the metadata of a file. Does nothing on a file system without extended attributes.
///
/// # Errors
/// Returns an error if a system call fails, for example with `ENOSPC` if the metadata does not fit.
pub(crate) fn replace(file: &File, metadata: &Metadata) -> io::Result<()> {
    let mut names = vec![0; MAX_READ];
    let len = match sys::flistxattr(file, &mut names[..]) {
        Ok(len) => len,
        Err(Errno::NOTSUP) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    names.truncate(len);
    for name in ours(&names) {
        if !metadata.contains_key(&name[PREFIX.len()..]) {
            match sys::fremovexattr(file, name) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    for (key, value) in metadata {
        let name = format!("{PREFIX}{key}");
        sys::fsetxattr(file, name, value.as_bytes(), sys::XattrFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(pairs: &[(&str, &str)]) -> Metadata {
        let pairs = pairs.iter();
        pairs.map(|(k, v)| ((*k).into(), (*v).into())).collect()
    }

    #[test]
    fn what_no_file_can_carry_is_refused() {
        let long = "k".repeat(MAX_NAME - PREFIX.len() + 1);
        let large = "v".repeat(MAX_TOTAL);
        for pairs in [
            [("", "v")],
            [(long.as_str(), "v")],
            [("k", large.as_str())],
            [("k", "ä")],
            [("k\n", "v")],
            [("k", "\u{7f}")],
        ] {
            assert!(check(&metadata(&pairs)).is_err(), "{pairs:.20?}");
        }
        assert_eq!(check(&metadata(&[("a-b", "x ~"), ("c", "")])), Ok(()));
    }

    #[test]
    fn a_file_carries_exactly_what_came_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = File::create(&path).unwrap();
        let other = "user.other";
        let set =
            |name: &str, value: &[u8]| sys::fsetxattr(&file, name, value, sys::XattrFlags::empty());
        if set(other, b"1") == Err(Errno::NOTSUP) {
            println!("skipped: needs attributes on {}", dir.path().display());
            return;
        }
        let first = metadata(&[("a", "1"), ("b", "2")]);
        replace(&file, &first).unwrap();
        assert_eq!(read(&path), first);
        let second = metadata(&[("b", "3"), ("c", "")]);
        replace(&file, &second).unwrap();
        assert_eq!(read(&path), second);
        // Values that are not text are skipped.
        set("user.e2b.d", b"\xff").unwrap();
        assert_eq!(read(&path), second);
        replace(&file, &Metadata::new()).unwrap();
        assert_eq!(read(&path), Metadata::new());
        let mut value = [0; 8];
        assert_eq!(sys::fgetxattr(&file, other, &mut value[..]), Ok(1));
        assert_eq!(read(Path::new("/nowhere")), Metadata::new());
    }
}
