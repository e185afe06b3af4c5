//! The accounts `root` and `user` in the account files of an image (passwd(5), group(5), shadow(5)).

use super::{Additions, MAX_ACCOUNTS, ProvisionError, children, file};
use crate::{
    source::Source,
    tar::Meta,
    tree::{Kind, Tree},
};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Files with passwords, which exist in images that contain the shadow suite. PAM rejects accounts without a line in
/// them.
const SHADOW: [(&str, &str); 2] = [
    ("/etc/shadow", ":!:19723:0:99999:7:::"),
    ("/etc/gshadow", ":!::"),
];
/// The first uid that `useradd` assigns.
const FIRST_UID: u32 = 1000;
const LAST_UID: u32 = 60_000;
const NAME: &str = "user";

/// The account files of an image.
pub(super) struct Accounts {
    passwd: AccountFile,
    group: AccountFile,
    shadow: Vec<(AccountFile, &'static str)>,
}

struct AccountFile {
    path: &'static str,
    meta: Meta,
    text: String,
    is_changed: bool,
}

/// The home directory of `user`, and its owner.
struct Home {
    path: String,
    uid: u32,
    gid: u32,
}

impl Accounts {
    pub(super) fn of(tree: &Tree, layers: &[impl Source]) -> Result<Self, ProvisionError> {
        let read = |path| AccountFile::of(tree, layers, path);
        let mut shadow = Vec::new();
        for (path, line) in SHADOW {
            if tree.find(path.as_bytes()).is_some() {
                shadow.push((read(path)?, line));
            }
        }
        Ok(Self {
            passwd: read(PASSWD)?,
            group: read(GROUP)?,
            shadow,
        })
    }

    /// Adds missing accounts and home directories.
    pub(super) fn add(
        mut self,
        tree: &Tree,
        additions: &mut Additions,
    ) -> Result<(), ProvisionError> {
        if self.passwd.line("root").is_none() {
            self.passwd.append("root:x:0:0:root:/root:/bin/bash");
        }
        if self.group.line("root").is_none() {
            self.group.append("root:x:0:");
        }
        let home = self.add_user()?;
        for (file, rest) in &mut self.shadow {
            if file.line(NAME).is_none() {
                file.append(&format!("{NAME}{rest}"));
            }
        }
        let shadow = self.shadow.into_iter().map(|(file, _)| file);
        for file in [self.passwd, self.group].into_iter().chain(shadow) {
            if file.is_changed {
                additions.file(file.path, file.meta, file.text.as_bytes());
            }
        }
        home.add(tree, additions)
    }

    /// The account `user`, which gets the first number that is free both as user and as group id.
    fn add_user(&mut self) -> Result<Home, ProvisionError> {
        if let Some(line) = self.passwd.line(NAME) {
            return Home::parse(line).ok_or(ProvisionError::Accounts {
                path: PASSWD,
                fault: "has a malformed line of the account user",
            });
        }
        let is_free = |id: &u32| !self.passwd.has_number(*id) && !self.group.has_number(*id);
        let free = (FIRST_UID..=LAST_UID).find(is_free);
        let uid = free.ok_or(ProvisionError::Accounts {
            path: PASSWD,
            fault: "has no free user id below 60000",
        })?;
        let line = self
            .group
            .line(NAME)
            .and_then(|line| field(line, 2)?.parse().ok());
        let gid = line.unwrap_or(uid);
        if line.is_none() {
            self.group.append(&format!("{NAME}:x:{gid}:"));
        }
        let path = format!("/home/{NAME}");
        self.passwd
            .append(&format!("{NAME}:x:{uid}:{gid}::{path}:/bin/bash"));
        Ok(Home { path, uid, gid })
    }
}

fn field(line: &str, number: usize) -> Option<&str> {
    line.split(':').nth(number)
}

impl AccountFile {
    fn of(tree: &Tree, layers: &[impl Source], path: &'static str) -> Result<Self, ProvisionError> {
        let invalid = |fault| ProvisionError::Accounts { path, fault };
        let mut this = Self {
            path,
            meta: super::meta(0o644),
            text: String::new(),
            is_changed: false,
        };
        if tree.find(path.as_bytes()).is_none() {
            return Ok(this);
        }
        let (node, content) = file(tree, path).ok_or(invalid("is not a regular file"))?;
        if content.size > MAX_ACCOUNTS {
            return Err(invalid("has more than 1 MiB"));
        }
        let mut bytes = vec![0; usize::try_from(content.size).unwrap_or(0)];
        let read = |source| ProvisionError::Read { path, source };
        content.read(layers, &mut bytes).map_err(read)?;
        this.text = String::from_utf8(bytes).map_err(|_| invalid("is not UTF-8"))?;
        this.meta = node.meta.clone();
        Ok(this)
    }

    fn line(&self, name: &str) -> Option<&str> {
        let mut lines = self.text.lines();
        lines.find(|line| field(line, 0) == Some(name))
    }

    /// Whether a line has this user or group id.
    fn has_number(&self, id: u32) -> bool {
        let number = |line: &str| field(line, 2).and_then(|number| number.parse().ok());
        self.text.lines().any(|line| number(line) == Some(id))
    }

    fn append(&mut self, line: &str) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(line);
        self.text.push('\n');
        self.is_changed = true;
    }
}

impl Home {
    fn parse(line: &str) -> Option<Self> {
        Some(Self {
            uid: field(line, 2)?.parse().ok()?,
            gid: field(line, 3)?.parse().ok()?,
            path: field(line, 5)
                .filter(|path| path.starts_with('/'))?
                .to_owned(),
        })
    }

    /// Creates the directory if it is missing, with the files of `/etc/skel`, and makes the user its owner.
    fn add(self, tree: &Tree, additions: &mut Additions) -> Result<(), ProvisionError> {
        let own = |meta: &Meta| Meta {
            uid: self.uid,
            gid: self.gid,
            ..meta.clone()
        };
        let present = tree.find(self.path.as_bytes()).map(|id| tree.node(id));
        match present.map(|node| (&node.kind, &node.meta)) {
            Some((Kind::Directory(_), meta)) => additions.directory(&self.path, own(meta)),
            Some(_) => {
                return Err(ProvisionError::Accounts {
                    path: PASSWD,
                    fault: "gives the account user a file as its home",
                });
            }
            None => {
                additions.directory(&self.path, own(&super::meta(0o755)));
                for (name, id) in children(tree, "/etc/skel") {
                    let node = tree.node(id);
                    if let Kind::File(content) = &node.kind {
                        let path = [self.path.as_bytes(), b"/", &name].concat();
                        additions.copy(&path, own(&node.meta), content);
                    }
                }
            }
        }
        Ok(())
    }
}
