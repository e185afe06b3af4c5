//! Opening the files of a VM, and creating its sockets and its scratch file.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::BorrowedFd,
        unix::{fs::OpenOptionsExt, net::UnixListener},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use model::{MANIFEST_NAME, RestoreSpec, VmSpec};
use nix::libc;

use super::error::{FilesError, failed};
use super::lineage::{Home, Lineage, Named, Size};
use super::regular::open;
use super::roles::{FileRole, Files, TemplateFile};
use super::sys;
use crate::connect::connect;

/// Directory for the file that receives a guest's disk writes. /var/tmp is meant for large temporary files (FHS 5.15)
/// and is usually not a tmpfs.
const SCRATCH: &str = "/var/tmp";
/// Length in bytes of the header before each frame of a TAP: `virtio_net_hdr` with `num_buffers` (virtio 1.2, 5.1.6).
const TAP_HEADER: i32 = 12;

/// Opens the files for [`crate::Request::Boot`], and records the lineage of the VM.
///
/// # Errors
/// Returns [`FilesError`] if an existing file cannot be opened, if a file or socket cannot be created, or if the TAP
/// cannot be configured.
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

/// Opens the files for [`crate::Request::Restore`], and records the lineage of the VM.
///
/// # Errors
/// Returns the errors of [`of_boot`]. A missing or invalid file of the template is not an error here; the VMM reports
/// it.
pub fn of_restore(
    spec: &RestoreSpec,
    tap: Option<BorrowedFd<'_>>,
) -> Result<(Files, Lineage), FilesError> {
    let places = Places {
        base: spec.base.as_deref(),
        root: spec.root.as_deref(),
    };
    let (mut files, lineage) = of_template(&spec.template, places)?;
    files.machine(&spec.vsock, spec.console.as_deref(), tap)?;
    Ok((files, lineage))
}

/// Locations of the files that a manifest names, if they are not at the paths in the manifest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places<'a> {
    /// Directory of the base, for a diff.
    pub base: Option<&'a Path>,
    /// Path of the root image.
    pub root: Option<&'a Path>,
}

/// Opens the files of a template, its root image and, if it is a diff, the files of its base. The lineage contains the
/// root image path from the manifest, because snapshots of the VM name it again.
///
/// # Errors
/// Returns [`FilesError`] if an existing file cannot be opened.
pub fn of_template(dir: &Path, places: Places<'_>) -> Result<(Files, Lineage), FilesError> {
    let mut files = Files::default();
    files.directory(dir, FileRole::Template)?;
    let manifest = dir.join(MANIFEST_NAME);
    // Without a readable manifest, there are no further files to open. The VMM reports the invalid manifest.
    let Ok((named, _)) = Named::read(&manifest) else {
        let (root, size, home) = (PathBuf::new(), Size::NONE, None);
        return Ok((files, Lineage { root, size, home }));
    };
    files.read(FileRole::Root, places.root.unwrap_or(&named.root))?;
    let whole = match &named.base {
        None => dir,
        Some(named) => places.base.unwrap_or(&named.dir),
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

impl Files {
    /// Opens a file for reading. A file that does not exist is omitted.
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

    /// Opens the files that every VM needs, and creates its sockets.
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
            // The client sets the header length, because the VMM's seccomp filter forbids it: a VMM must not change a
            // TAP that outlives it.
            let copy = sys::set_tap_header_len(tap, TAP_HEADER)
                .and_then(|()| tap.try_clone_to_owned())
                .map_err(FilesError::Tap)?;
            self.insert(FileRole::Tap, copy);
        }
        let scratch = Path::new(SCRATCH);
        let file = scratch_file(scratch).map_err(failed("create a file in", scratch))?;
        self.insert(FileRole::Scratch, file);
        // The socket is created last, so that no earlier error leaves it behind.
        let socket = listen(vsock).map_err(failed("listen at", vsock))?;
        self.insert(FileRole::Vsock, socket);
        Ok(())
    }
}

/// Creates an unlinked file, which disappears with the VMM.
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

/// Listens at `path`. Replaces a socket file that no process listens at.
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
    // Any other error, such as a timeout on a full backlog, means that a process may still listen.
    let answer = connect(path, Some(Duration::from_millis(1)));
    matches!(answer, Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_file_without_a_listener_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let first = listen(&path).unwrap();
        assert!(listen(&path).is_err(), "in use");
        drop(first);
        assert!(listen(&path).is_ok());
    }
}
