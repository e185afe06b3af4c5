//! Adds files that a sandbox needs and the layers of an image lack: mount points, the accounts `root` and `user`, a
//! shell, basic programs, and files for the guest's network.
//!
//! Nothing of the image is executed. The additions are another layer, made from the merged tree and the static programs
//! of a [`Userland`]. Existing files are kept, with three exceptions: files that describe the host on which a container
//! runs (`/etc/hosts`…) are replaced, `user` becomes the owner of its home, and everything below `/usr/local` becomes
//! writable for all users, as in E2B's templates.

mod accounts;

use std::{fs::File, os::unix::fs::FileExt};

use crate::{
    digest::Digest,
    source::Source,
    tar::{Content, Entry, EntryKind, Meta, Segment},
    tree::{Kind, MergeError, Node, NodeId, Tree},
};
use accounts::Accounts;

/// Part of each image's key. Raise it when provisioning results in a different image.
const VERSION: u32 = 3;

/// Limit for the size of an account file, in bytes. The guest's agent does not read larger ones.
const MAX_ACCOUNTS: u64 = 1 << 20;

/// Static programs for images that lack them, from Debian's packages `bash-static` and `busybox-static`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Userland {
    pub bash: Vec<u8>,
    pub busybox: Vec<u8>,
}

impl Userland {
    /// Reads the programs from open files, whatever their positions are.
    pub(crate) fn of_files(bash: &File, busybox: &File) -> std::io::Result<Self> {
        let read = |file: &File| {
            let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, 0)?;
            Ok::<_, std::io::Error>(bytes)
        };
        Ok(Self {
            bash: read(bash)?,
            busybox: read(busybox)?,
        })
    }

    /// Changes whenever the additions to an image do.
    pub(crate) fn digest(&self) -> Digest {
        let programs = [&self.bash, &self.busybox].map(|program| Digest::of(program));
        Digest::of(format!("provision {VERSION}\n{programs:?}\n").as_bytes())
    }
}

/// An image that cannot be made to run.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    #[error("image has a file at {0}, where sandboxes need a directory: remove it from the image")]
    NotDirectory(&'static str),
    #[error(
        "{path} of the image {fault}, so accounts cannot be added: replace it with a regular file"
    )]
    Accounts {
        path: &'static str,
        fault: &'static str,
    },
    #[error(
        "{path} of the image is not a program for 64-bit x86 processors: use an image for linux/amd64"
    )]
    Machine { path: &'static str },
    #[error("{path} of the image cannot be read")]
    Read {
        path: &'static str,
        source: std::io::Error,
    },
    #[error("image cannot be completed for sandboxes")]
    Apply(#[source] MergeError),
}

/// Mount points of the agent and directories of the base image, with their modes.
const DIRECTORIES: [(&str, u16); 13] = [
    ("/bin", 0o755),
    ("/code", 0o777),
    ("/dev", 0o755),
    ("/etc", 0o755),
    ("/etc/sudoers.d", 0o750),
    ("/home", 0o755),
    ("/mnt", 0o755),
    ("/proc", 0o555),
    ("/root", 0o700),
    ("/run", 0o755),
    ("/sys", 0o555),
    ("/tmp", 0o1777),
    ("/usr/local", 0o777),
];

/// A file of the recipe of the root image `base`.
macro_rules! recipe {
    ($name:literal) => {
        include_bytes!(concat!("../../../guest/images/base/files/etc/", $name))
    };
}

/// Files that are the same in every guest, as in the root image `base`.
const FILES: [(&str, u16, &[u8]); 6] = [
    ("/etc/gai.conf", 0o644, recipe!("gai.conf")),
    ("/etc/hostname", 0o644, recipe!("hostname")),
    ("/etc/hosts", 0o644, recipe!("hosts")),
    // Empty: each clone gets its own.
    ("/etc/machine-id", 0o644, b""),
    ("/etc/resolv.conf", 0o644, recipe!("resolv.conf")),
    // Has no effect until sudo is installed by the image or a step of the build.
    ("/etc/sudoers.d/user", 0o440, recipe!("sudoers.d/user")),
];

/// The list of mounted file systems, as read by setmntent(3) and other programs: the link, and its target.
const MOUNTS: (&str, &str) = ("/etc/mtab", "../proc/self/mounts");

/// Directories that are searched for programs.
const PLACES: [&str; 6] = [
    "/bin",
    "/sbin",
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
];
/// The path of busybox to which links point. An image's own busybox may lack applets.
const BUSYBOX: &str = "/usr/lib/cube/busybox";
/// Programs of Debian's static busybox that commands and steps of builds expect. Each program that an image lacks
/// becomes a link to busybox.
pub const PROGRAMS: [&str; 71] = [
    "[",
    "basename",
    "cat",
    "chgrp",
    "chmod",
    "chown",
    "clear",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "dirname",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "getopt",
    "grep",
    "gunzip",
    "gzip",
    "head",
    "hostname",
    "id",
    "kill",
    "ln",
    "ls",
    "md5sum",
    "mkdir",
    "mkfifo",
    "mktemp",
    "mount",
    "mv",
    "od",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sh",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "stty",
    "sync",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "tty",
    "umount",
    "uname",
    "uniq",
    "unzip",
    "wc",
    "wget",
    "which",
    "whoami",
    "xargs",
    "yes",
];

/// Completes the tree of an image. `layers` are the archives to which its contents refer, the last one with the number
/// `index - 1`. Returns the archive of layer `index`, to which the contents of the additions refer.
///
/// # Errors
/// Returns an error if a file of the image is in the place of an addition, or if the image is for another machine.
pub fn provision(
    tree: &mut Tree,
    layers: &[impl Source],
    userland: &Userland,
    index: u32,
) -> Result<Vec<u8>, ProvisionError> {
    let mut additions = Additions::new(index);
    add_directories(tree, &mut additions)?;
    let accounts = Accounts::of(tree, layers)?;
    accounts.add(tree, &mut additions)?;
    add_programs(tree, layers, userland, &mut additions)?;
    for (path, mode, content) in FILES {
        additions.file(path, meta(mode), content);
    }
    additions.link(MOUNTS.0, MOUNTS.1);
    let Additions { entries, bytes, .. } = additions;
    tree.apply(entries).map_err(ProvisionError::Apply)?;
    tree.open_to_all(b"/usr/local");
    Ok(bytes)
}

fn add_directories(tree: &Tree, additions: &mut Additions) -> Result<(), ProvisionError> {
    for (path, mode) in DIRECTORIES {
        match tree.find(path.as_bytes()).map(|id| &tree.node(id).kind) {
            Some(Kind::Directory(_)) => {}
            Some(_) => return Err(ProvisionError::NotDirectory(path)),
            None => additions.directory(path, meta(mode)),
        }
    }
    Ok(())
}

fn add_programs(
    tree: &Tree,
    layers: &[impl Source],
    userland: &Userland,
    additions: &mut Additions,
) -> Result<(), ProvisionError> {
    let has = |name: &str| {
        let at = |place| file(tree, &format!("{place}/{name}")).is_some();
        PLACES.into_iter().any(at)
    };
    for path in ["/bin/sh", "/bin/bash"] {
        if let Some((_, content)) = file(tree, path) {
            check_machine(layers, content, path)?;
        }
    }
    // The path with which E2B's SDKs start each command.
    if file(tree, "/bin/bash").is_none() {
        additions.file("/bin/bash", meta(0o755), &userland.bash);
    }
    let is_missing = |name: &&str| match *name {
        "sh" => file(tree, "/bin/sh").is_none(),
        name => !has(name),
    };
    let missing: Vec<_> = PROGRAMS.into_iter().filter(is_missing).collect();
    if !missing.is_empty() {
        additions.file(BUSYBOX, meta(0o755), &userland.busybox);
    }
    for name in missing {
        additions.link(&format!("/bin/{name}"), BUSYBOX);
    }
    Ok(())
}

/// Rejects a program for other processors. Scripts are accepted.
fn check_machine(
    layers: &[impl Source],
    content: &Content,
    path: &'static str,
) -> Result<(), ProvisionError> {
    const X86_64: [u8; 2] = 62_u16.to_le_bytes();
    let read = |source| ProvisionError::Read { path, source };
    let mut header = [0; 20];
    if content.size < header.len() as u64 {
        return Ok(());
    }
    content.read(layers, &mut header).map_err(read)?;
    let is_elf = header.starts_with(b"\x7fELF");
    // Class and machine (System V ABI, "ELF header").
    if is_elf && (header[4] != 2 || header[18..20] != X86_64) {
        return Err(ProvisionError::Machine { path });
    }
    Ok(())
}

/// The regular file at a path, and its content.
fn file<'a>(tree: &'a Tree, path: &str) -> Option<(&'a Node, &'a Content)> {
    let node = tree.node(tree.find(path.as_bytes())?);
    match &node.kind {
        Kind::File(content) => Some((node, content)),
        Kind::Directory(_) | Kind::Symlink(_) | Kind::Fifo => None,
    }
}

fn meta(mode: u16) -> Meta {
    Meta {
        mode,
        ..Meta::default()
    }
}

/// The entries of the added layer and the bytes of its files.
struct Additions {
    index: u32,
    entries: Vec<Entry>,
    bytes: Vec<u8>,
}

impl Additions {
    fn new(index: u32) -> Self {
        Self {
            index,
            entries: Vec::new(),
            bytes: Vec::new(),
        }
    }

    fn push(&mut self, path: &[u8], meta: Meta, kind: EntryKind) {
        let path = path.to_vec();
        self.entries.push(Entry { path, meta, kind });
    }

    fn directory(&mut self, path: &str, meta: Meta) {
        self.push(path.as_bytes(), meta, EntryKind::Directory);
    }

    fn link(&mut self, path: &str, target: &str) {
        let kind = EntryKind::Symlink(target.into());
        self.push(path.as_bytes(), meta(0o777), kind);
    }

    fn file(&mut self, path: &str, meta: Meta, content: &[u8]) {
        let (offset, len) = (self.bytes.len() as u64, content.len() as u64);
        self.bytes.extend(content);
        let segment = Segment { at: 0, offset, len };
        let content = Content {
            layer: self.index,
            size: len,
            segments: Vec::from_iter((len > 0).then_some(segment)),
        };
        self.push(path.as_bytes(), meta, EntryKind::File(content));
    }

    /// Adds a copy of a file of the image. Contents are shared.
    fn copy(&mut self, path: &[u8], meta: Meta, content: &Content) {
        self.push(path, meta, EntryKind::File(content.clone()));
    }
}

/// The children of a directory of the tree.
fn children(tree: &Tree, path: &str) -> Vec<(Box<[u8]>, NodeId)> {
    let node = tree.find(path.as_bytes()).map(|id| tree.node(id));
    match node.map(|node| &node.kind) {
        Some(Kind::Directory(children)) => {
            children.iter().map(|(n, id)| (n.clone(), *id)).collect()
        }
        _ => Vec::new(),
    }
}
