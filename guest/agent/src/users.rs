//! Accounts, read from /etc/passwd and /etc/group. `getpwnam` is not used: a static C library cannot load its plug-ins,
//! and every clone would pay for the pages that they touch.
//!
//! Both files are cached in memory and read again only after they have changed on disk.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::sys::Credentials;

/// Largest size of an account file in bytes; a larger file counts as empty.
const MAX_FILE: u64 = 1 << 20;

/// An account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) home: String,
    /// Never empty: if the field is empty, this is /bin/sh.
    pub(crate) shell: String,
    pub(crate) credentials: Credentials,
}

/// The account files.
pub(crate) struct UserDb {
    passwd: CachedFile,
    group: CachedFile,
}

struct CachedFile {
    path: PathBuf,
    stamp: Option<Stamp>,
    text: String,
}

/// Attributes that change when a file does.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl CachedFile {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            stamp: None,
            text: String::new(),
        }
    }

    /// The current content; empty if the file is missing, too large or not UTF-8.
    fn text(&mut self) -> &str {
        let stamp = fs::metadata(&self.path).ok().map(|m| Stamp {
            device: m.dev(),
            inode: m.ino(),
            size: m.size(),
            changed: (m.ctime(), m.ctime_nsec()),
        });
        if stamp != self.stamp || stamp.is_none() {
            self.text = match stamp {
                Some(Stamp {
                    size: 0..=MAX_FILE, ..
                }) => fs::read_to_string(&self.path).unwrap_or_default(),
                _ => String::new(),
            };
            self.stamp = stamp;
        }
        &self.text
    }
}

impl UserDb {
    /// The files of this system.
    pub(crate) fn system() -> Self {
        Self::at(Path::new("/etc/passwd"), Path::new("/etc/group"))
    }

    fn at(passwd: &Path, group: &Path) -> Self {
        Self {
            passwd: CachedFile::new(passwd),
            group: CachedFile::new(group),
        }
    }

    /// The account with that name.
    pub(crate) fn find(&mut self, name: &str) -> Option<User> {
        let mut user = account(self.passwd.text(), name)?;
        let gid = user.credentials.gid;
        user.credentials.groups = groups_of(self.group.text(), name, gid);
        Some(user)
    }

    /// The name of a user, or its number if it has none.
    pub(crate) fn user_name(&mut self, uid: u32) -> String {
        name_of_number(self.passwd.text(), uid)
    }

    /// The name of a group, or its number if it has none.
    pub(crate) fn group_name(&mut self, gid: u32) -> String {
        name_of_number(self.group.text(), gid)
    }

    /// The name of the account with that number, or `root` if there is none.
    pub(crate) fn name_of(&mut self, uid: u32) -> String {
        let text = self.passwd.text();
        let mut names = text.lines().filter_map(|line| line.split(':').next());
        let has = |name: &&str| account(text, name).is_some_and(|u| u.credentials.uid == uid);
        names.find(has).unwrap_or("root").to_owned()
    }
}

/// The name on the line `name:password:number:…` with that number, or the number itself.
fn name_of_number(text: &str, number: u32) -> String {
    let mut lines = text.lines().map(|line| line.split(':'));
    let wanted = number.to_string();
    let name = lines.find_map(|mut fields| {
        let name = fields.next().filter(|name| !name.is_empty())?;
        (fields.nth(1) == Some(wanted.as_str())).then_some(name)
    });
    name.map_or(wanted.clone(), str::to_owned)
}

/// Reads the line `name:password:uid:gid:comment:home:shell` of an account (passwd(5)).
fn account(passwd: &str, name: &str) -> Option<User> {
    let mut lines = passwd.lines().map(|line| line.split(':'));
    let mut fields =
        lines.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1)?.to_owned();
    let shell = fields.next().filter(|shell| !shell.is_empty());
    Some(User {
        name: name.to_owned(),
        home,
        // The default of passwd(5) for an empty field.
        shell: shell.unwrap_or("/bin/sh").to_owned(),
        credentials: Credentials {
            uid,
            gid,
            groups: Vec::new(),
        },
    })
}

/// The primary group, then those whose line `name:password:gid:members` lists the user (group(5)).
fn groups_of(group: &str, name: &str, primary: u32) -> Vec<u32> {
    let mut groups = vec![primary];
    for line in group.lines() {
        let mut fields = line.split(':').skip(2);
        let gid = fields.next().and_then(|gid| gid.parse().ok());
        let member = fields
            .next()
            .is_some_and(|m| m.split(',').any(|m| m == name));
        if let Some(gid) = gid.filter(|gid| member && !groups.contains(gid)) {
            groups.push(gid);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1001::/home/user:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:other,user\nuser:x:1001:user\nbad:x:y:user\n";

    #[test]
    fn accounts_and_groups_are_found() {
        let user = account(PASSWD, "user").unwrap();
        assert_eq!(
            (user.credentials.uid, user.home.as_str()),
            (1000, "/home/user")
        );
        assert_eq!(user.shell, "/bin/sh");
        assert_eq!(account(PASSWD, "root").unwrap().shell, "/bin/bash");
        assert_eq!(account("a:x:1:1::/:", "a").unwrap().shell, "/bin/sh");
        assert_eq!(account(PASSWD, "broken"), None);
        assert_eq!(account(PASSWD, ""), None);
        assert_eq!(groups_of(GROUP, "user", 1001), [1001, 27]);
        assert_eq!(groups_of(GROUP, "root", 0), [0]);
        assert_eq!(name_of_number(PASSWD, 1000), "user");
        assert_eq!(name_of_number(GROUP, 27), "sudo");
        assert_eq!(name_of_number(GROUP, 28), "28");
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (passwd, group) = (dir.path().join("passwd"), dir.path().join("group"));
        fs::write(&passwd, PASSWD).unwrap();
        let mut db = UserDb::at(&passwd, &group);
        assert!(db.find("late").is_none());
        fs::write(&passwd, "late:x:1:2::/:\n").unwrap();
        assert_eq!(db.find("late").unwrap().credentials.groups, [2]);
        fs::remove_file(&passwd).unwrap();
        assert!(db.find("late").is_none());
    }

    proptest! {
        #[test]
        fn hostile_files_never_panic(passwd in "[a-z:,0-9\n]{0,80}", name in "[a-z]{0,3}") {
            let _ = account(&passwd, &name);
            let _ = groups_of(&passwd, &name, 0);
            let _ = name_of_number(&passwd, 0);
        }
    }
}
