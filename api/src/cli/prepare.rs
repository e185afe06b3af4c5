//! `cube-api prepare`: prepares the first start of a server from the files that were installed next to this program.
//!
//! ```text
//! <program directory>/../guest/   kernel, initramfs, root image, layer (as an archive), static programs
//! <state>/installed/guest/        the same files, as links
//! <state>/installed/templates/    base, and the templates of bundles
//! ```
//! The files are below the state directory, because the pool hard-links those that sandboxes use, and links cannot
//! cross file systems. Each file is replaced by one rename. A running server continues with the previous file, and the
//! next one rebuilds the template from the new files. Files are synced before they get their names, so that after a
//! power loss each of them, and the template, is either complete or absent.

mod bundle;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use api::serve::{StateError, open_state};
use model::{GuestPaths, MANIFEST_NAME, STATE_DIR};
use pool::durable::{Durability, copy, replace, sync_dir, sync_files};
use template::{Builder, Limits, Recipe};

use super::{
    Failure,
    config::{ServeArgs, spec},
    failure,
};

/// Names of the linked files.
const FILES: [&str; 5] = ["vmlinux", "initramfs.cpio", ROOT, "bash", "busybox"];
const ROOT: &str = "base.erofs";
const LAYER: &str = "layer.ext4";
/// The layer, as an archive because a package cannot contain its holes.
const LAYER_ARCHIVE: &str = "layer.tar.gz";
/// Hash of the archive from which the layer was unpacked.
const STAMP: &str = "layer.stamp";
const BASE: &str = "base";

/// The directory in which `prepare` keeps the installed files and `serve` finds them.
pub(super) fn installed(state: &Path) -> PathBuf {
    state.join("installed")
}

pub(super) fn run(args: ServeArgs) -> Result<(), Failure> {
    let (config, layers) = args.load()?;
    if let Some(warning) = layers.deprecation() {
        eprintln!("cube-api: {warning}");
    }
    let state = &config.server.state;
    let program = std::env::current_exe();
    let program = program.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let vmm = spec::vmm(&config, beside);
    let failed = |text, kind| below_state(state, text, kind);
    open_state(state).map_err(|why| {
        let kind = match &why {
            StateError::Io { source, .. } => source.kind(),
            StateError::Open { .. } => io::ErrorKind::Other,
        };
        failed(model::chain(&why), kind)
    })?;
    let installed = installed(state);
    let guest = installed.join("guest");
    publish_all(&beside.join("../guest"), &guest).map_err(|why| {
        let text = format!("cannot prepare {}: {why}", guest.display());
        failed(text, why.kind())
    })?;
    let to = Installation {
        guest: &guest,
        templates: installed.join("templates"),
        vmm: &vmm,
    };
    let template = to.templates.join(BASE);
    if template.join(MANIFEST_NAME).is_file() {
        eprintln!("cube-api: template {BASE} exists: {}", template.display());
    } else {
        let io = |why: io::Error| {
            Failure::UnsuitableHost(format!("cannot create {}: {why}", template.display()))
        };
        let recipe = template::base(&guest_paths(&guest)).map_err(io)?;
        let out = to.build(BASE, &recipe, None)?;
        keep(&out, &template).map_err(io)?;
    }
    bundle::prepare_all(&beside.join("../guest/templates"), &to)?;
    to.clean()
}

/// Where templates are installed, and what they are built with.
struct Installation<'a> {
    guest: &'a Path,
    templates: PathBuf,
    vmm: &'a Path,
}

fn guest_paths(guest: &Path) -> GuestPaths {
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join("initramfs.cpio"),
        root: guest.join(ROOT),
        layer: guest.join(LAYER),
    }
}

/// A failure below the state directory. For the packaged unit, all other directories are read-only.
fn below_state(state: &Path, text: String, kind: io::ErrorKind) -> Failure {
    let dir = state.display();
    Failure::UnsuitableHost(match kind {
        io::ErrorKind::ReadOnlyFilesystem => format!(
            "{text}\nthe service may write to {STATE_DIR} only: `mkdir -m 700 {dir}`, then `systemctl edit cube-api`, and \
             below [Service] write `ReadWritePaths={dir}` (in /home, also `ProtectHome=no`)"
        ),
        _ => text,
    })
}

/// Links or copies all files of the guest from `from` to `to`.
fn publish_all(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for name in FILES {
        publish(&from.join(name), &to.join(name))?;
    }
    let built = from.join(LAYER);
    if !built.is_file() {
        return unpack_layer(&from.join(LAYER_ARCHIVE), to);
    }
    // In a checkout.
    publish(&built, &to.join(LAYER))
}

/// Links the file `from` to `to`, or copies it from another file system, unless this has already been done.
fn publish(from: &Path, to: &Path) -> io::Result<()> {
    let source = fs::metadata(from).map_err(|why| named(from, &why))?;
    let is_same = |present: &fs::Metadata| {
        let is_link = (present.dev(), present.ino()) == (source.dev(), source.ino());
        // A unit's state directory is a separate mount, to which no file can be linked although it is the same device.
        let is_copy =
            present.len() == source.len() && present.modified().ok() == source.modified().ok();
        is_link || is_copy
    };
    if fs::metadata(to).is_ok_and(|present| is_same(&present)) {
        return Ok(());
    }
    let new = to.with_extension("new");
    remove(&new)?;
    match fs::hard_link(from, &new) {
        Err(why) if why.kind() == io::ErrorKind::CrossesDevices => {
            copy(from, &new)
                .and_then(|()| {
                    let copy = File::open(&new)?;
                    copy.set_permissions(source.permissions())?;
                    copy.set_modified(source.modified()?)?;
                    copy.sync_all()
                })
                .map_err(|why| named(from, &why))?;
        }
        linked => linked.map_err(|why| named(from, &why))?,
    }
    fs::rename(&new, to)
}

/// Unpacks the layer into the directory `to`, unless this has already been done with this archive.
fn unpack_layer(archive: &Path, to: &Path) -> io::Result<()> {
    let stamp = to.join(STAMP);
    let current = template::file_sum(archive)?;
    let layer = to.join(LAYER);
    if layer.is_file() && fs::read_to_string(&stamp).is_ok_and(|sum| sum == current) {
        return Ok(());
    }
    let new = to.join("layer.new");
    fs::create_dir_all(&new)?;
    let tar = Command::new("tar")
        .args([
            "--extract",
            "--sparse",
            "--gzip",
            "--no-same-owner",
            "--file",
        ])
        .arg(archive)
        .arg("--directory")
        .arg(&new)
        .arg(LAYER)
        .status();
    let status = tar.map_err(|why| named(Path::new("tar"), &why))?;
    if !status.success() {
        let why = format!("tar cannot unpack {}: {status}", archive.display());
        return Err(io::Error::other(why));
    }
    sync_files(&new)?;
    // An existing stamp belongs to the previous layer.
    remove(&stamp)?;
    sync_dir(to)?;
    fs::rename(new.join(LAYER), &layer)?;
    fs::remove_dir_all(&new)?;
    sync_dir(to)?;
    replace(to, STAMP, current.as_bytes(), Durability::Host)
}

/// Moves a template that was built in the directory `out` to its final name.
fn keep(out: &Path, dir: &Path) -> io::Result<()> {
    sync_files(out)?;
    fs::rename(out, dir)?;
    sync_dir(dir.parent().unwrap_or(dir))
}

impl Installation<'_> {
    /// The directory of unfinished templates, on the same file system as the finished ones.
    fn draft(&self) -> PathBuf {
        self.templates.with_file_name(".new")
    }

    /// Builds the template `name` in a temporary directory, which it returns.
    fn build(&self, name: &str, recipe: &Recipe, files: Option<&Path>) -> Result<PathBuf, Failure> {
        let began = Instant::now();
        eprintln!("cube-api: creating the template {name}: boot, warm-up, snapshot");
        let io = |why: io::Error| {
            Failure::UnsuitableHost(format!("cannot create the template {name}: {why}"))
        };
        let new = self.draft();
        self.clean()?;
        fs::create_dir_all(&self.templates).map_err(io)?;
        fs::create_dir(&new).map_err(io)?;
        let (log, out) = (new.join("vmm.log"), new.join(name));
        let builder = Builder {
            vmm: self.vmm,
            run: &new,
            log: &log,
            limits: Limits::default(),
        };
        let report = builder.build(recipe, files, &out, &|_| Ok(()));
        let report = report.map_err(|error| {
            let console = error.console.join("\n");
            let why = model::chain(&error);
            Failure::UnsuitableHost(format!(
                "cannot create the template {name}: {why}\nlast lines of the guest's console:\n{console}\n\
                 `cube doctor` checks what the host lacks"
            ))
        })?;
        template::add_maker(&out, self.vmm).map_err(io)?;
        let seconds = began.elapsed().as_secs_f32();
        eprintln!(
            "cube-api: template {name} is ready after {seconds:.1} s; the guest was {}",
            report.quiet
        );
        Ok(out)
    }

    /// Removes what a build, or one that was cut off, has left.
    fn clean(&self) -> Result<(), Failure> {
        let new = self.draft();
        fs::remove_dir_all(&new).or_else(|why| match why.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(Failure::UnsuitableHost(format!("{}: {why}", new.display()))),
        })
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}

fn named(path: &Path, why: &io::Error) -> io::Error {
    io::Error::new(why.kind(), format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use power_loss::Recording;

    use super::*;

    const RECORDED: &str = "CUBE_TEST_PREPARE";

    /// Packs the file `layer.ext4` of a directory.
    fn pack(dir: &Path, archive: &Path) {
        let tar = Command::new("tar")
            .args(["--create", "--sparse", "--gzip", "--file"])
            .arg(archive)
            .arg("--directory")
            .args([dir, Path::new(LAYER)])
            .status();
        assert!(tar.unwrap().success());
    }

    /// The traced program: prepares the files, and gives a template its name.
    #[test]
    fn recorded() {
        let Some(dir) = std::env::var_os(RECORDED).map(PathBuf::from) else {
            return;
        };
        let (guest, new) = (dir.join("state/guest"), dir.join("state/new"));
        publish_all(&dir.join("from"), &guest).unwrap();
        fs::create_dir(&new).unwrap();
        fs::create_dir(dir.join("state/templates")).unwrap();
        for name in [MANIFEST_NAME, "memory"] {
            fs::write(new.join(name), "whole").unwrap();
        }
        sync_dir(&dir.join("state")).unwrap();
        keep(&new, &dir.join("state/templates").join(BASE)).unwrap();
        fs::write(dir.join("marks"), "kept").unwrap();
    }

    #[test]
    fn a_power_loss_leaves_the_template_and_the_layer_whole_or_absent() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (from, state, trace) = (root.join("from"), root.join("state"), root.join("trace"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&state).unwrap();
        for name in FILES {
            fs::write(from.join(name), name).unwrap();
        }
        fs::write(root.join(LAYER), "layer").unwrap();
        pack(&root, &from.join(LAYER_ARCHIVE));
        let status = Command::new("strace")
            .args(power_loss::TRACED)
            .arg("-o")
            .arg(&trace)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "cli::prepare::tests::recorded"])
            .env(RECORDED, &root)
            .status()
            .expect("strace: apt-get install strace");
        assert!(status.success());
        let trace = fs::read_to_string(trace).unwrap();
        let sum = template::file_sum(&from.join(LAYER_ARCHIVE)).unwrap();
        let recording = Recording::new(&trace, &state, &root.join("marks")).unwrap();
        let crashes = recording.crashes();
        assert!(crashes.len() > 10, "{}", crashes.len());
        for crash in crashes {
            let files = crash.tree.files(Path::new("templates/base"));
            let is_whole = files.len() == 2 && files.values().all(|bytes| bytes == b"whole");
            assert!(files.is_empty() || is_whole, "{}", crash.tree);
            assert!(
                is_whole || recording.marks(crash.at).is_empty(),
                "{}",
                crash.tree
            );
            let stamp = crash.tree.file(Path::new("guest/layer.stamp"));
            assert!(
                stamp.is_none_or(|stamp| stamp == sum.as_bytes()),
                "{}",
                crash.tree
            );
        }
        // tar, which writes the layer, is not traced.
        let layer = state.join("guest/layer.new").join(LAYER);
        let hex: String = layer
            .to_str()
            .unwrap()
            .bytes()
            .map(|b| format!("\\x{b:02x}"))
            .collect();
        let at = |call: &str| {
            trace
                .lines()
                .position(|line| line.contains(call) && line.contains(&hex))
        };
        let (synced, named) = (at("fsync("), at("rename("));
        assert!(synced.is_some() && synced < named, "{synced:?} {named:?}");
    }

    fn inode(path: &Path) -> u64 {
        fs::metadata(path).unwrap().ino()
    }

    #[test]
    fn a_state_directory_that_the_unit_may_not_write_to_is_refused_with_the_cure() {
        let text = |kind| below_state(Path::new("/srv/cube"), "x".to_owned(), kind).to_string();
        let why = text(io::ErrorKind::ReadOnlyFilesystem);
        assert!(why.contains("`ReadWritePaths=/srv/cube`"), "{why}");
        assert_eq!(text(io::ErrorKind::NotFound), "x");
    }

    #[test]
    fn files_are_links_which_follow_an_upgrade_and_leave_the_former_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        for name in FILES {
            fs::write(from.join(name), name).unwrap();
        }
        let layer = dir.path().join(LAYER);
        File::create(&layer).unwrap().set_len(1 << 30).unwrap();
        let pack = || pack(dir.path(), &from.join(LAYER_ARCHIVE));
        pack();
        publish_all(&from, &to).unwrap();
        for name in FILES {
            assert_eq!(inode(&from.join(name)), inode(&to.join(name)));
        }
        let meta = fs::metadata(to.join(LAYER)).unwrap();
        assert_eq!((meta.len(), meta.blocks()), (1 << 30, 0), "it has holes");

        // Nothing changes without an upgrade.
        let before = inode(&to.join(LAYER));
        publish_all(&from, &to).unwrap();
        assert_eq!(inode(&to.join(LAYER)), before);

        // As dpkg does: a new file under the same name.
        let used = File::open(to.join("vmlinux")).unwrap();
        fs::write(from.join("x"), "newer").unwrap();
        fs::rename(from.join("x"), from.join("vmlinux")).unwrap();
        fs::write(&layer, "other").unwrap();
        pack();
        publish_all(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("vmlinux")).unwrap(), "newer");
        assert_eq!(io::read_to_string(used).unwrap(), "vmlinux");
        assert_eq!(fs::read_to_string(to.join(LAYER)).unwrap(), "other");

        fs::remove_file(from.join("bash")).unwrap();
        let why = publish_all(&from, &to).unwrap_err().to_string();
        assert!(why.contains("from/bash"), "{why}");
    }
}
