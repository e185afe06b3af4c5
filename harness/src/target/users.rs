//! Users of a root directory, from its `/etc/passwd`.

use std::{fs, path::Path};

use super::command::failed;
use crate::event::{Failure, FailureCause};

/// Ids of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Finds a user by name.
///
/// # Errors
/// Returns an error if the root has no such user.
pub(super) fn find(root: &Path, name: &str) -> Result<User, Failure> {
    let text = fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    let user = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        Some(User {
            uid: fields.nth(1)?.parse().ok()?,
            gid: fields.next()?.parse().ok()?,
        })
    });
    user.ok_or_else(|| {
        let why = format!("{} has no user {name:?}", root.join("etc/passwd").display());
        failed("exec", FailureCause::Exec, &why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_their_whole_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let text =
            "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1001::/home/user:/bin/bash\nbad:x::\n";
        fs::write(root.path().join("etc/passwd"), text).unwrap();
        let ids = |name| find(root.path(), name).ok().map(|u| (u.uid, u.gid));
        assert_eq!(ids("root"), Some((0, 0)));
        assert_eq!(ids("user"), Some((1000, 1001)));
        assert_eq!((ids("use"), ids("bad"), ids("")), (None, None, None));
    }
}
