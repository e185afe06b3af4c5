//! The files of a VM. A VMM opens nothing by path: its client opens what the VM needs and hands the descriptors
//! over beside the request, each under a [`FileRole`].
//!
//! A file that does not exist is left out, and the VMM says which of its files are missing: it knows which of
//! them a template must have. What a manifest names (root image, base) is opened as well, so a client must not
//! hand in a template whose manifest somebody else wrote; see [`Lineage`].

mod sys;

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Bytes, MANIFEST_NAME, RestoreSpec, VmSpec, template_file};
use nix::libc;
use serde::{Deserialize, Serialize};

use crate::{FailureKind, SnapshotContent, connect::connect, frame::FrameError};

/// Where a guest's disk writes go: large temporary files belong there (FHS 5.15), and it is not a tmpfs.
const SCRATCH: &str = "/var/tmp";
/// Bytes of the header before each frame of a TAP: virtio_net_hdr with num_buffers (virtio 1.2, 5.1.6).
const TAP_HEADER: i32 = 12;
/// Longest manifest that is read, in bytes.
const MAX_MANIFEST: u64 = 1 << 20;

/// A file in a template's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateFile {
    /// [`MANIFEST_NAME`].
    Manifest,
    /// [`template_file::STATE`].
    State,
    /// [`template_file::MEMORY`].
    Memory,
    /// [`template_file::LAYER`].
    Layer,
    /// [`template_file::EXTENTS`].
    Extents,
    /// [`template_file::WORKING_SET`].
    WorkingSet,
}

impl TemplateFile {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Manifest,
        Self::State,
        Self::Memory,
        Self::Layer,
        Self::Extents,
        Self::WorkingSet,
    ];

    /// Its name in the directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Manifest => MANIFEST_NAME,
            Self::State => template_file::STATE,
            Self::Memory => template_file::MEMORY,
            Self::Layer => template_file::LAYER,
            Self::Extents => template_file::EXTENTS,
            Self::WorkingSet => template_file::WORKING_SET,
        }
    }
}

/// What a descriptor beside a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// `/dev/kvm`.
    Kvm,
    /// The TAP of the VM's network card.
    Tap,
    /// The listening socket at which hosts reach guest ports.
    Vsock,
    /// Receives the console.
    Console,
    /// The kernel to boot.
    Kernel,
    /// The initramfs to boot.
    Initrd,
    /// The root image, for reading.
    Root,
    /// The layer to boot with, for reading.
    Layer,
    /// An unlinked file for what the guest writes to its disk.
    Scratch,
    /// A file of the template: for reading in a restore, for writing in a snapshot.
    Template(TemplateFile),
    /// A file of the base of a diff, for reading.
    Base(TemplateFile),
}

/// Descriptors by their role.
#[derive(Debug, Default)]
pub struct Files(BTreeMap<FileRole, OwnedFd>);

impl Files {
    /// The descriptors of a frame with the roles that its body names.
    ///
    /// # Errors
    /// [`FrameError::Files`]: their numbers differ, or a role comes twice.
    pub fn received(roles: &[FileRole], fds: Vec<OwnedFd>) -> Result<Self, FrameError> {
        let (named, came) = (roles.len(), fds.len());
        let files: BTreeMap<_, _> = roles.iter().copied().zip(fds).collect();
        if named == came && files.len() == named {
            Ok(Self(files))
        } else {
            Err(FrameError::Files { named, came })
        }
    }

    /// Adds a file.
    pub fn insert(&mut self, role: FileRole, file: impl Into<OwnedFd>) {
        self.0.insert(role, file.into());
    }

    /// Takes a file out.
    #[must_use]
    pub fn take(&mut self, role: FileRole) -> Option<OwnedFd> {
        self.0.remove(&role)
    }

    pub(crate) fn roles(&self) -> Vec<FileRole> {
        self.0.keys().copied().collect()
    }

    pub(crate) fn borrowed(&self) -> Vec<BorrowedFd<'_>> {
        self.0.values().map(AsFd::as_fd).collect()
    }

    /// Opens a file for reading; one that is not there is left out.
    fn read(&mut self, role: FileRole, path: &Path) -> Result<(), FilesError> {
        match open(path) {
            Ok(file) => self.insert(role, file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("open", path)(e)),
        }
        Ok(())
    }

    fn directory(
        &mut self,
        dir: &Path,
        role: fn(TemplateFile) -> FileRole,
    ) -> Result<(), FilesError> {
        TemplateFile::ALL
            .into_iter()
            .try_for_each(|file| self.read(role(file), &dir.join(file.name())))
    }

    /// What every VM has.
    fn machine(
        &mut self,
        vsock: &Path,
        console: Option<&Path>,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<(), FilesError> {
        let kvm = Path::new("/dev/kvm");
        let opened = OpenOptions::new().read(true).write(true).open(kvm);
        self.insert(FileRole::Kvm, opened.map_err(FilesError::Kvm)?);
        if let Some(path) = console {
            let console = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(path);
            self.insert(FileRole::Console, console.map_err(failed("create", path))?);
        }
        if let Some(tap) = tap {
            // A VMM may not change it: its TAP is another VM's later.
            let copy = sys::set_tap_header_len(tap, TAP_HEADER)
                .and_then(|()| tap.try_clone_to_owned())
                .map_err(FilesError::Tap)?;
            self.insert(FileRole::Tap, copy);
        }
        let scratch = Path::new(SCRATCH);
        let file = scratch_file(scratch).map_err(failed("create a file in", scratch))?;
        self.insert(FileRole::Scratch, file);
        // Last: what fails before leaves no socket behind.
        let socket = listen(vsock).map_err(failed("listen at", vsock))?;
        self.insert(FileRole::Vsock, socket);
        Ok(())
    }
}

/// Why the files of a VM could not be opened or made.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// No KVM.
    #[error("cannot open /dev/kvm (is KVM enabled, and may this user open it?)")]
    Kvm(#[source] io::Error),
    /// The network descriptor is no usable TAP.
    #[error("cannot use the network descriptor as a TAP")]
    Tap(#[source] io::Error),
    /// A file.
    #[error("cannot {verb} {path}")]
    File {
        /// `open`, `create`, …
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The place of a snapshot is taken.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// A snapshot names files that its VM was not made from, or is of a VM of another size.
    #[error("{path} is not of its VM: another root image, another base, or another size")]
    Lineage {
        /// The manifest.
        path: PathBuf,
    },
}

impl FilesError {
    /// What a caller can act on.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Kvm(_) => FailureKind::UnsuitableHost,
            Self::Exists(_) => FailureKind::BadSpec,
            Self::Lineage { .. } => FailureKind::BadSnapshot,
            Self::File { source, .. } if is_full(source) => FailureKind::NoSpace,
            Self::File { verb: "open", .. } => FailureKind::BadSpec,
            Self::Tap(_) => FailureKind::BadSpec,
            Self::File { .. } => FailureKind::Io,
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

pub(crate) fn failed(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FilesError {
    let path = path.to_owned();
    move |source| FilesError::File { verb, path, source }
}

/// What a VM was made from. The manifest of a snapshot says so, and whoever restores it opens the files that it
/// names and makes room for the size that it gives; a captured VMM writes what it likes there. So a client keeps the
/// lineage of a VM from its making, and no snapshot of it is accepted that has another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// The root image.
    pub root: PathBuf,
    /// Its size.
    pub size: Size,
    /// The whole template that a diff may name; absent for a VM that was booted, and for one whose template does not
    /// outlive its start.
    pub home: Option<Home>,
}

/// The size of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
}

impl Size {
    /// Of no VM.
    pub(crate) const NONE: Self = Self {
        memory: Bytes(0),
        vcpus: 0,
    };
}

/// The directory of a whole template, and which manifest was there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Home {
    /// The directory in which the manifest really lay, links followed.
    pub dir: PathBuf,
    /// Device and inode of the manifest.
    pub manifest: (u64, u64),
}

impl Home {
    /// Where a manifest really lies.
    fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let manifest = file.metadata()?;
        Ok(Self {
            dir: real.parent().unwrap_or(&real).to_owned(),
            manifest: (manifest.dev(), manifest.ino()),
        })
    }

    /// Whether the same manifest is still there. One that was removed can have other names all the same.
    fn stands(&self) -> bool {
        fs::metadata(self.dir.join(MANIFEST_NAME))
            .is_ok_and(|found| (found.dev(), found.ino()) == self.manifest)
    }
}

impl Lineage {
    /// As much of a VM as can be written: a diff needs the template that it names.
    pub(crate) fn possible(&self, content: SnapshotContent) -> SnapshotContent {
        if self.home.as_ref().is_some_and(Home::stands) {
            content
        } else {
            SnapshotContent::Full
        }
    }

    /// Accepts a manifest that names this lineage; its bytes.
    pub(crate) fn check(&self, path: &Path) -> Result<Vec<u8>, FilesError> {
        let (named, bytes) = Named::read(path).map_err(failed("read", path))?;
        let home = self.home.as_ref().map(|home| &home.dir);
        let base = named.base.as_ref().map(|base| &base.dir);
        let made_from = named.root == self.root && (base.is_none() || base == home);
        let same = made_from && named.size == self.size;
        same.then_some(bytes).ok_or_else(|| FilesError::Lineage {
            path: path.to_owned(),
        })
    }
}

/// What a manifest says that others rely on.
#[derive(Deserialize)]
struct Named {
    root: PathBuf,
    #[serde(flatten)]
    size: Size,
    #[serde(default)]
    base: Option<NamedBase>,
}

#[derive(Deserialize)]
struct NamedBase {
    dir: PathBuf,
}

impl Named {
    fn read(path: &Path) -> io::Result<(Self, Vec<u8>)> {
        let mut bytes = Vec::new();
        open(path)?.take(MAX_MANIFEST).read_to_end(&mut bytes)?;
        Ok((serde_json::from_slice(&bytes)?, bytes))
    }
}

/// What a boot needs, and the lineage of its VM.
///
/// # Errors
/// See [`FilesError`].
pub fn of_boot(spec: &VmSpec, tap: Option<BorrowedFd<'_>>) -> Result<(Files, Lineage), FilesError> {
    let mut files = Files::default();
    files.read(FileRole::Kernel, &spec.guest.kernel)?;
    files.read(FileRole::Initrd, &spec.guest.initrd)?;
    files.read(FileRole::Root, &spec.guest.root)?;
    files.read(FileRole::Layer, &spec.guest.layer)?;
    files.machine(&spec.vsock, spec.console.as_deref(), tap)?;
    let lineage = Lineage {
        root: spec.guest.root.clone(),
        size: Size {
            memory: spec.memory,
            vcpus: spec.vcpus,
        },
        home: None,
    };
    Ok((files, lineage))
}

/// What a restore needs, and the lineage of its VM.
///
/// # Errors
/// See [`FilesError`]. What is wrong with a template is the VMM's to say.
pub fn of_restore(
    spec: &RestoreSpec,
    tap: Option<BorrowedFd<'_>>,
) -> Result<(Files, Lineage), FilesError> {
    let (mut files, lineage) = of_template(&spec.template, spec.base.as_deref())?;
    files.machine(&spec.vsock, spec.console.as_deref(), tap)?;
    Ok((files, lineage))
}

/// The files of a template, of its base, and its root image.
///
/// # Errors
/// See [`FilesError`].
pub fn of_template(dir: &Path, base: Option<&Path>) -> Result<(Files, Lineage), FilesError> {
    let mut files = Files::default();
    files.directory(dir, FileRole::Template)?;
    let manifest = dir.join(MANIFEST_NAME);
    // One that cannot be read names nothing; the VMM says what is wrong with it.
    let Ok((named, _)) = Named::read(&manifest) else {
        let (root, size, home) = (PathBuf::new(), Size::NONE, None);
        return Ok((files, Lineage { root, size, home }));
    };
    files.read(FileRole::Root, &named.root)?;
    let whole = match &named.base {
        None => dir,
        Some(named) => base.unwrap_or(&named.dir),
    };
    if named.base.is_some() {
        files.directory(whole, FileRole::Base)?;
    }
    let manifest = whole.join(MANIFEST_NAME);
    let home = match Home::of(&manifest) {
        Ok(home) => Some(home),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed("find", &manifest)(e)),
    };
    let (root, size) = (named.root, named.size);
    Ok((files, Lineage { root, size, home }))
}

/// Opens a regular file for reading. What is named may be anything: a FIFO would wait for its writer.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is no regular file"))
    }
}

/// A file without a name: nothing is left behind, however the VMM ends.
fn scratch_file(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.custom_flags(libc::O_TMPFILE).open(directory) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            let name = format!("layer.{}.{}", std::process::id(), crate::process::number());
            let path = directory.join(name);
            let file = options.custom_flags(0).create_new(true).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        other => other,
    }
}

/// Listens at `path`. A socket there that nobody serves any more is replaced.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}

fn is_stale(path: &Path) -> bool {
    // Whoever has a full queue lives.
    let answer = connect(path, Some(Duration::from_millis(1)));
    matches!(answer, Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: &str = r#""memory":"1GiB","vcpus":2"#;

    fn manifest(dir: &Path, json: &str) {
        fs::write(dir.join(MANIFEST_NAME), json).unwrap();
    }

    #[test]
    fn a_template_is_opened_with_its_base_and_its_root() {
        let dir = tempfile::tempdir().unwrap();
        let (base, diff) = (dir.path().join("base"), dir.path().join("diff"));
        let root = dir.path().join("root");
        fs::write(&root, "r").unwrap();
        for (at, json) in [
            (&base, format!(r#"{{"root":{root:?},{SIZE}}}"#)),
            (
                &diff,
                format!(r#"{{"root":{root:?},{SIZE},"base":{{"dir":{base:?}}}}}"#),
            ),
        ] {
            fs::create_dir(at).unwrap();
            manifest(at, &json);
            fs::write(at.join(template_file::MEMORY), "m").unwrap();
        }
        let (files, lineage) = of_template(&diff, None).unwrap();
        let expected = [
            FileRole::Root,
            FileRole::Template(TemplateFile::Manifest),
            FileRole::Template(TemplateFile::Memory),
            FileRole::Base(TemplateFile::Manifest),
            FileRole::Base(TemplateFile::Memory),
        ];
        assert_eq!(files.roles(), expected);
        let home = lineage.home.clone().unwrap();
        assert_eq!(home.dir, base);
        assert_eq!(
            lineage.possible(SnapshotContent::Diff),
            SnapshotContent::Diff
        );
        lineage.check(&diff.join(MANIFEST_NAME)).unwrap();
        // The same file by another name is not where the diff would look for it.
        fs::hard_link(base.join(MANIFEST_NAME), dir.path().join("link")).unwrap();
        fs::remove_file(base.join(MANIFEST_NAME)).unwrap();
        fs::write(base.join(MANIFEST_NAME), "another").unwrap();
        assert_eq!(
            lineage.possible(SnapshotContent::Diff),
            SnapshotContent::Full
        );
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&fifo, Path::new("/dev/zero"), dir.path()] {
            assert!(open(path).is_err(), "{}", path.display());
        }
    }

    #[test]
    fn a_snapshot_of_another_lineage_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let lineage = Lineage {
            root: "/images/root".into(),
            size: Size {
                memory: Bytes(1 << 30),
                vcpus: 2,
            },
            home: Some(Home {
                dir: "/templates/base".into(),
                manifest: (0, 0),
            }),
        };
        let path = dir.path().join(MANIFEST_NAME);
        for (json, is_same) in [
            (format!(r#"{{"root":"/images/root",{SIZE}}}"#), true),
            (
                format!(r#"{{"root":"/images/root",{SIZE},"base":{{"dir":"/templates/base"}}}}"#),
                true,
            ),
            (format!(r#"{{"root":"/etc/shadow",{SIZE}}}"#), false),
            (
                format!(
                    r#"{{"root":"/images/root",{SIZE},"base":{{"dir":"/sandboxes/a/pause"}}}}"#
                ),
                false,
            ),
            (
                r#"{"root":"/images/root","memory":"1TiB","vcpus":2}"#.to_owned(),
                false,
            ),
            (
                r#"{"root":"/images/root","memory":"1GiB","vcpus":1}"#.to_owned(),
                false,
            ),
            (r#"{"root":"/images/root"}"#.to_owned(), false),
            ("not json".to_owned(), false),
        ] {
            manifest(dir.path(), &json);
            assert_eq!(lineage.check(&path).is_ok(), is_same, "{json}");
        }
    }

    #[test]
    fn a_socket_that_nobody_serves_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let first = listen(&path).unwrap();
        assert!(listen(&path).is_err(), "in use");
        drop(first);
        assert!(listen(&path).is_ok());
    }

    #[test]
    fn every_descriptor_has_one_role() {
        let fds = |n: usize| -> Vec<OwnedFd> {
            let file = || tempfile::tempfile().unwrap().into();
            (0..n).map(|_| file()).collect()
        };
        let roles = [FileRole::Kvm, FileRole::Root];
        assert!(Files::received(&roles, fds(2)).is_ok());
        assert!(Files::received(&roles, fds(1)).is_err());
        assert!(Files::received(&roles, fds(3)).is_err());
        assert!(Files::received(&[FileRole::Kvm, FileRole::Kvm], fds(2)).is_err());
    }
}
