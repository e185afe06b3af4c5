//! The description of a path.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::Path,
};

use envd::{EntryInfo, FileType, Timestamp};

use super::super::files::metadata;
use crate::users::UserDb;

/// Names of owners and groups, cached for one request.
#[derive(Default)]
pub(crate) struct Names {
    users: BTreeMap<u32, String>,
    groups: BTreeMap<u32, String>,
}

impl Names {
    fn user(&mut self, uid: u32, db: &mut UserDb) -> String {
        let name = self.users.entry(uid);
        name.or_insert_with(|| db.user_name(uid)).clone()
    }

    fn group(&mut self, gid: u32, db: &mut UserDb) -> String {
        let name = self.groups.entry(gid);
        name.or_insert_with(|| db.group_name(gid)).clone()
    }
}

/// Describes the entry at `path`, with `shown` as its path in the response. The flag is true for a directory, but
/// not for a link to one.
pub(crate) fn entry(
    path: &Path,
    shown: &Path,
    names: &mut Names,
    db: &mut UserDb,
) -> io::Result<(EntryInfo, bool)> {
    let found = fs::symlink_metadata(path)?;
    let (mut kind, mut mode, mut symlink_target) = (kind(&found), bits(&found), None);
    if found.is_symlink() {
        let target = fs::canonicalize(path);
        let target = target.as_deref().unwrap_or(path);
        symlink_target = Some(target.to_string_lossy().into_owned());
        // A dangling link has neither type nor mode.
        (kind, mode) = fs::metadata(path).map_or((FileType::Unspecified, 0), |target| {
            (self::kind(&target), bits(&target))
        });
    }
    let name = shown.file_name().unwrap_or(shown.as_os_str());
    let entry = EntryInfo {
        name: name.to_string_lossy().into_owned(),
        kind,
        path: shown.to_string_lossy().into_owned(),
        size: i64::try_from(found.size()).unwrap_or(i64::MAX),
        mode,
        permissions: letters(&found),
        owner: names.user(found.uid(), db),
        group: names.group(found.gid(), db),
        modified_time: modified(&found),
        symlink_target,
        metadata: metadata::read(path),
    };
    Ok((entry, found.is_dir()))
}

fn kind(found: &fs::Metadata) -> FileType {
    match found.file_type() {
        kind if kind.is_file() => FileType::File,
        kind if kind.is_dir() => FileType::Directory,
        _ => FileType::Unspecified,
    }
}

fn bits(found: &fs::Metadata) -> u32 {
    found.permissions().mode() & 0o777
}

/// The modification time; `None` for times up to 1970-01-01.
fn modified(found: &fs::Metadata) -> Option<Timestamp> {
    let seconds = u64::try_from(found.mtime()).ok()?;
    let ns = u64::try_from(found.mtime_nsec()).ok()?;
    let unix_ns = seconds.checked_mul(1_000_000_000)?.checked_add(ns)?;
    (unix_ns > 0).then(|| Timestamp::from_unix_ns(unix_ns))
}

/// Type and permissions in the format of Go's `FileMode.String`, which differs from that of `ls`.
fn letters(found: &fs::Metadata) -> String {
    let (kind, mode) = (found.file_type(), found.permissions().mode());
    let flags = [
        ('d', kind.is_dir()),
        ('L', kind.is_symlink()),
        ('D', kind.is_block_device() || kind.is_char_device()),
        ('p', kind.is_fifo()),
        ('S', kind.is_socket()),
        ('u', mode & libc::S_ISUID != 0),
        ('g', mode & libc::S_ISGID != 0),
        ('c', kind.is_char_device()),
        ('t', mode & libc::S_ISVTX != 0),
    ];
    let set = flags.into_iter().filter(|(_, is_set)| *is_set);
    let mut text: String = set.map(|(letter, _)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (place, letter) in "rwxrwxrwx".chars().enumerate() {
        let is_set = mode >> (8 - place) & 1 == 1;
        text.push(if is_set { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::symlink, time::SystemTime};

    fn of(path: &Path) -> EntryInfo {
        entry(path, path, &mut Names::default(), &mut UserDb::system())
            .unwrap()
            .0
    }

    #[test]
    fn permissions_are_formatted_as_by_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "").unwrap();
        let with = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            of(&path).permissions
        };
        assert_eq!(with(0o640), "-rw-r-----");
        assert_eq!(with(0o4755), "urwxr-xr-x");
        assert_eq!(with(0o2111), "g--x--x--x");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(of(dir.path()).permissions, "dtrwxrwxrwx");
        assert_eq!(of(Path::new("/dev/null")).permissions, "Dcrw-rw-rw-");
        assert_eq!(of(Path::new("/dev/null")).kind, FileType::Unspecified);
        assert_eq!(of(Path::new("/")).name, "/");
    }

    #[test]
    fn links_are_described_with_their_targets() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let path = |name: &str| root.join(name);
        fs::write(path("f"), "content").unwrap();
        fs::set_permissions(path("f"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("f", path("one")).unwrap();
        symlink("one", path("two")).unwrap();
        symlink("/nowhere", path("dangling")).unwrap();
        symlink("cycle", path("cycle")).unwrap();
        let two = of(&path("two"));
        assert_eq!((two.kind, two.mode, two.size), (FileType::File, 0o600, 3));
        assert_eq!(two.permissions, "Lrwxrwxrwx");
        assert_eq!(two.path, path("two").to_str().unwrap());
        assert_eq!(two.symlink_target.as_deref(), path("f").to_str());
        for name in ["dangling", "cycle"] {
            let nowhere = of(&path(name));
            assert_eq!((nowhere.kind, nowhere.mode), (FileType::Unspecified, 0));
            assert_eq!(nowhere.symlink_target.as_deref(), path(name).to_str());
        }
    }

    #[test]
    fn times_before_1970_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = fs::File::create(&path).unwrap();
        let day = std::time::Duration::from_secs(86_400);
        file.set_modified(SystemTime::UNIX_EPOCH - day).unwrap();
        assert_eq!(of(&path).modified_time, None);
        file.set_modified(SystemTime::UNIX_EPOCH + day).unwrap();
        let known = Timestamp::from_unix_ns(86_400_000_000_000);
        assert_eq!(of(&path).modified_time, Some(known));
    }
}
