//! One template: its files, and what is known of them.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{SandboxId, TEMPLATE_FORMAT, WarmUpRequest, template_file};
use vmm_control::template::loaded_size;

use crate::{
    diff::Stored,
    durable::{allocated, read_bounded},
    images::{BootFiles, Images},
    info::{TemplateDefaults, TemplateInfo, TemplateKind},
    manifest::{MAX_FILE, Manifest},
    memory_diff,
    rebuilt::Rebuild,
    record::{Kept, Size, TemplateRecord},
    store::{Checked, Store},
    vmms::VmmId,
};

/// The directory of a template's files, next to its record.
pub const IMAGE: &str = "image";

/// How the memory of a template is stored on the disk.
#[derive(Debug)]
pub enum Storage {
    /// Stored whole permanently: the template is a diff or a disk, the pool did not make its files, or a diff of the
    /// memory would not be smaller.
    Whole,
    /// Stored whole since this time (CLOCK_MONOTONIC), and not yet compared with a base.
    New { since_ns: u64 },
    /// Stored as a diff. The memory file is made when a VM needs it.
    Diff(Stored),
}

#[derive(Debug)]
pub struct Template {
    pub info: TemplateInfo,
    /// The directory of the template's files.
    pub dir: PathBuf,
    pub root: PathBuf,
    /// The directory of the base, if the template is a diff.
    pub base: Option<PathBuf>,
    pub boot: Option<BootFiles>,
    /// Disk space of the layer on the host, in bytes, including its base.
    pub layer_bytes: u64,
    pub defaults: TemplateDefaults,
    /// The VMM that made the template. For a disk template, the current VMM.
    pub vmm: VmmId,
    /// Requests that warm up a clone before it becomes a warm slot. If empty, the clone runs a command instead.
    pub warm_up: Arc<[WarmUpRequest]>,
    pub storage: Storage,
    /// Space that the memory occupies when loaded, in bytes.
    pub loaded_bytes: u64,
    /// The record in the state directory. `None` for an installed template.
    pub(crate) kept: Option<Kept>,
    /// Directory and rebuild state of an installed template. `None` for other templates.
    pub rebuild: Option<Rebuild>,
    /// Whether the template has the format of this release's VMM.
    pub(crate) is_ours: bool,
}

/// The origin of a new template. Files that the pool made are in the subdirectory `image` of the template's directory.
#[derive(Clone, Debug)]
pub enum Origin {
    /// Files in a directory that the pool does not manage.
    Elsewhere(PathBuf),
    /// A snapshot, for [`TemplateKind::Snapshot`] or [`TemplateKind::Built`].
    Saved(TemplateKind, Saved),
    /// A layer, the files from which it boots, and the sandbox from which the layer was saved.
    Disk(Size, BootFiles, Option<SandboxId>),
}

/// The sandbox of a snapshot.
#[derive(Clone, Debug)]
pub struct Saved {
    pub source: SandboxId,
    pub vmm: VmmId,
    pub boot: Option<BootFiles>,
    pub defaults: TemplateDefaults,
}

impl Origin {
    pub(crate) fn record(self, names: Vec<String>, created_unix_s: u64) -> Kept {
        let new = |kind| Kept::new(kind, names, created_unix_s);
        match self {
            Self::Elsewhere(dir) => Kept {
                elsewhere: Some(dir),
                ..new(TemplateKind::Installed)
            },
            Self::Saved(kind, saved) => Kept {
                source: Some(saved.source),
                vmm: Some(saved.vmm),
                boot: saved.boot,
                defaults: saved.defaults,
                ..new(kind)
            },
            Self::Disk(size, boot, source) => Kept {
                source,
                machine: Some(size),
                boot: Some(boot),
                ..new(TemplateKind::Disk)
            },
        }
    }
}

impl Template {
    /// Reads the files of a template with memory. The caller sets its names, its kind and its VMM.
    pub(crate) fn read(dir: &Path, id: String, store: &Store) -> Result<Self, String> {
        let Checked {
            dir,
            manifest,
            base,
            root,
        } = store.check(dir)?;
        // The layer of a diff contains only changed blocks, so the size of the disk comes from the base's layer.
        let disk = match &base {
            Some(base) => Manifest::read(base)?.layer_sum.bytes,
            None => manifest.layer_sum.bytes,
        };
        let layers = [Some(&dir), base.as_ref()].into_iter().flatten();
        let layers = layers.map(|dir| allocated(&dir.join(template_file::LAYER)));
        let info = TemplateInfo {
            id,
            names: Vec::new(),
            bytes: bytes_of(&dir),
            memory: manifest.memory,
            vcpus: manifest.vcpus,
            disk: model::Bytes(disk),
            created_unix_s: manifest.taken_at_unix_ns / 1_000_000_000,
            kind: TemplateKind::Installed,
            source: None,
            spawned: 0,
            warm: 0,
            vmm: None,
        };
        Ok(Self {
            layer_bytes: layers.sum(),
            boot: boot_files(&root, store),
            warm_up: read_warm_up(&dir)?,
            loaded_bytes: match &base {
                Some(_) => 0,
                // At most all of the memory. An unreadable file is reported when it is loaded.
                None => loaded_size(&dir).unwrap_or(manifest.memory.0),
            },
            base,
            is_ours: manifest.format == TEMPLATE_FORMAT,
            ..Self::new(info, dir, root)
        })
    }

    /// A template that is not loaded and not in use.
    pub(crate) fn new(info: TemplateInfo, dir: PathBuf, root: PathBuf) -> Self {
        Self {
            info,
            dir,
            root,
            base: None,
            boot: None,
            layer_bytes: 0,
            defaults: TemplateDefaults::default(),
            vmm: VmmId::default(),
            warm_up: Arc::default(),
            storage: Storage::Whole,
            loaded_bytes: 0,
            kept: None,
            rebuild: None,
            is_ours: true,
        }
    }

    /// The record with the current names. `None` for an installed template. `templates` is the directory of all
    /// templates in the state directory.
    pub(crate) fn record(&self, templates: &Path) -> Option<TemplateRecord> {
        let kept = Kept {
            names: self.info.names.clone(),
            ..self.kept.clone()?
        };
        let home = templates.join(&self.info.id);
        Some(TemplateRecord { home, kept })
    }
}

impl Template {
    /// Whether its memory can be loaded into huge pages. A diff is not, because its base may be; a disk has no memory.
    pub fn is_loadable(&self) -> bool {
        self.base.is_none() && self.info.kind != TemplateKind::Disk
    }

    /// Files and directories that must exist as long as the template.
    pub fn needs(&self) -> Vec<PathBuf> {
        let mut needs = vec![self.dir.clone(), self.root.clone()];
        needs.extend(self.base.clone());
        needs.extend(self.boot.iter().flat_map(BootFiles::paths));
        if let Storage::Diff(stored) = &self.storage {
            needs.extend(stored.base.clone());
        }
        needs
    }

    /// The directory with the recipe, if the template has one.
    pub fn recipe_dir(&self) -> PathBuf {
        let installed = self.rebuild.as_ref().map(|rebuild| &rebuild.installed);
        installed.unwrap_or(&self.dir).clone()
    }

    /// The origin of a copy of this template. `None` if it is not a built one.
    pub fn origin_of_copy(&self) -> Option<Origin> {
        let kind = TemplateKind::Built;
        let source = self
            .info
            .source
            .clone()
            .filter(|_| self.info.kind == kind)?;
        let saved = Saved {
            source,
            vmm: self.vmm.clone(),
            boot: self.boot.clone(),
            defaults: self.defaults.clone(),
        };
        Some(Origin::Saved(kind, saved))
    }

    pub(crate) fn set_vmm(&mut self, vmm: VmmId) {
        self.info.vmm = (self.info.kind != TemplateKind::Disk).then(|| vmm.clone());
        self.vmm = vmm;
    }

    /// Makes the template use links to its files, which do not change when it is reinstalled.
    pub(crate) fn keep_files(&mut self, store: &Store) {
        let kept = store
            .check(&self.dir)
            .map_err(io::Error::other)
            .and_then(|checked| {
                let dir = store.keep(&checked)?;
                store.check(&dir).map_err(io::Error::other)
            });
        match kept {
            Ok(checked) => {
                self.boot = boot_files(&checked.root, store);
                (self.dir, self.root) = (checked.dir, checked.root);
            }
            Err(error) => tracing::warn!(
                template = self.info.id,
                dir = %self.dir.display(),
                %error,
                "cannot link the files of an installed template: if it is replaced, its paused sandboxes are lost \
                 (put it on the file system of the state directory)"
            ),
        }
    }
}

/// Disk space of a template's files, without its root image and without a memory file that was made from a diff.
pub fn bytes_of(dir: &Path) -> model::Bytes {
    let is_diff = dir.join(memory_diff::NAME).is_file();
    let memory = if is_diff {
        memory_diff::NAME
    } else {
        template_file::MEMORY
    };
    let files = [
        memory,
        template_file::STATE,
        template_file::LAYER,
        template_file::EXTENTS,
    ];
    model::Bytes(files.iter().map(|name| allocated(&dir.join(name))).sum())
}

pub(crate) fn read_warm_up(dir: &Path) -> Result<Arc<[WarmUpRequest]>, String> {
    let path = dir.join(template_file::WARM_UP);
    let failed = |why: String| format!("{}: {why}", path.display());
    match read_bounded(&path, MAX_FILE) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Arc::default()),
        Err(e) => Err(failed(e.to_string())),
        Ok(bytes) => serde_json::from_slice::<Vec<_>>(&bytes)
            .map(Arc::from)
            .map_err(|e| failed(e.to_string())),
    }
}

/// The files with which a VM boots from this root image. Returns `None` if one of them is missing or not in the store.
fn boot_files(root: &Path, store: &Store) -> Option<BootFiles> {
    let files = Images::boot_files(root)?;
    Some(BootFiles {
        kernel: store.admit(&files.kernel).ok()?,
        initrd: store.admit(&files.initrd).ok()?,
        root: files.root,
    })
}
