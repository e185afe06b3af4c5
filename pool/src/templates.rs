//! Templates: their ids, names and files.
//!
//! ```text
//! <installed>/<name>/manifest.json …      made elsewhere; the id is derived from the name
//! <state>/images/<SHA-256>/               links to the files of an installed template, see [`crate::images`]
//! <state>/images/root-…/root              the root image of a disk template, and of what was made from it
//! <state>/templates/<id>/template.json    kind, names, time, directory of the files, VMM that made them
//!                        image/           files of a template that the pool made: of a disk only its layer; none for a
//!                                         template made elsewhere
//! ```
//! A name belongs to at most one template: giving it to another template removes it from the previous one. `name` is
//! short for `name:default`.

mod disk;
mod maker;
mod names;
mod naming;
mod rebuilt;
mod record;

pub(crate) use disk::Guest;
pub(crate) use naming::{Renamed, TakenNames};
pub(crate) use rebuilt::{Rebuild, Rebuilt};
pub(crate) use record::{Size, TemplateRecord};

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{MANIFEST_NAME, SandboxId, TEMPLATE_FORMAT, WarmUpRequest, template_file};
use vmm_control::template::loaded_size;

use crate::{
    durable::{allocated, private_dir, read_bounded},
    error::PoolError,
    host,
    images::Images,
    manifest::Manifest,
    memory_diff,
    record::BootFiles,
    spec::{TemplateDefaults, TemplateInfo, TemplateKind},
    store::{Checked, Store},
    vmms::{VmmId, Vmms},
    work::diff::{self, Stored},
};
use maker::maker;
use names::{check_name, id_of_bytes, id_of_name, plain};
use record::{Kept, name_vmm};

const MAX_FILE: u64 = 1 << 20;
/// The directory of a template's files, next to its record.
pub(crate) const IMAGE: &str = "image";

/// How the memory of a template is stored on the disk.
#[derive(Debug)]
pub(crate) enum Storage {
    /// Stored whole permanently: the template is a diff or a disk, the pool did not make its files, or a diff of the
    /// memory would not be smaller.
    Whole,
    /// Stored whole since this time (CLOCK_MONOTONIC), and not yet compared with a base.
    New { since_ns: u64 },
    /// Stored as a diff. The memory file is made when a VM needs it.
    Diff(Stored),
}

#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) info: TemplateInfo,
    /// The directory of the template's files.
    pub(crate) dir: PathBuf,
    pub(crate) root: PathBuf,
    /// The directory of the base, if the template is a diff.
    pub(crate) base: Option<PathBuf>,
    pub(crate) boot: Option<BootFiles>,
    /// Disk space of the layer on the host, in bytes, including its base.
    pub(crate) layer_bytes: u64,
    pub(crate) defaults: TemplateDefaults,
    /// The VMM that made the template. For a disk template, the current VMM.
    pub(crate) vmm: VmmId,
    /// Requests that warm up a clone before it becomes a warm slot. If empty, the clone runs a command instead.
    pub(crate) warm_up: Arc<[WarmUpRequest]>,
    pub(crate) storage: Storage,
    /// Space that the memory occupies when loaded, in bytes.
    pub(crate) loaded_bytes: u64,
    /// The record in the state directory. `None` for an installed template.
    kept: Option<Kept>,
    /// Directory and rebuild state of an installed template. `None` for other templates.
    pub(crate) rebuild: Option<Rebuild>,
    /// Whether the template has the format of this release's VMM.
    is_ours: bool,
}

/// A template that [`Templates::keep`] has added, and the records that must be written for it.
#[derive(Debug)]
pub(crate) struct NewTemplate {
    pub(crate) info: TemplateInfo,
    /// The record of the template, then the records of the templates that lose names to it. In this order a crash
    /// leaves each name with at least one template, and [`Templates::open`] gives it to one.
    pub(crate) records: Vec<TemplateRecord>,
    pub(crate) taken: TakenNames,
}

/// The origin of a new template. Files that the pool made are in the subdirectory `image` of the template's directory.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// Files in a directory that the pool does not manage.
    Elsewhere(PathBuf),
    /// A snapshot, for [`TemplateKind::Snapshot`] or [`TemplateKind::Built`].
    Saved(TemplateKind, Saved),
    /// A layer, the files from which it boots, and the sandbox from which the layer was saved.
    Disk(Size, BootFiles, Option<SandboxId>),
}

/// The sandbox of a snapshot.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) source: SandboxId,
    pub(crate) vmm: VmmId,
    pub(crate) boot: Option<BootFiles>,
    pub(crate) defaults: TemplateDefaults,
}

impl Origin {
    fn record(self, names: Vec<String>, created_unix_s: u64) -> Kept {
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

#[derive(Debug)]
pub(crate) struct Templates {
    /// `<state>/templates`.
    dir: PathBuf,
    store: Store,
    by_id: BTreeMap<String, Template>,
    /// Whether a template could not be read, so that the files it needs are unknown.
    is_partial: bool,
}

impl Templates {
    /// Reads the installed templates and those in the state directory, and keeps the VMMs that installed templates
    /// carry. Logs and ignores templates that this program cannot use. Removes directories without a record, which a
    /// killed server left unfinished.
    pub(crate) fn open(
        dir: PathBuf,
        installed: Option<&Path>,
        store: Store,
        vmms: &mut Vmms,
    ) -> io::Result<Self> {
        let mut this = Self {
            dir,
            store,
            by_id: BTreeMap::new(),
            is_partial: false,
        };
        for path in installed.map(directories).transpose()?.unwrap_or_default() {
            if path.join(MANIFEST_NAME).exists() {
                this.read_installed(&path, vmms);
            }
        }
        for path in directories(&this.dir)? {
            this.read_kept(&path, vmms);
        }
        this.share_names();
        Ok(this)
    }

    /// Assigns each name to the newest of the templates that have it. A crash of the host may have left a name both
    /// with a new template and with its previous one.
    fn share_names(&mut self) {
        let mut kept: Vec<_> = self
            .by_id
            .values_mut()
            .filter(|t| t.kept.is_some())
            .collect();
        kept.sort_by_key(|t| (t.info.created_unix_s, t.info.id.clone()));
        let mut owned = BTreeSet::new();
        for template in kept.into_iter().rev() {
            let names = &mut template.info.names;
            let before = names.len();
            names.retain(|name| owned.insert(plain(name).to_owned()));
            if names.len() == before {
                continue;
            }
            let written = template.record(&self.dir).map(|record| record.write());
            if let Some(Err(error)) = written {
                tracing::error!(template = template.info.id, %error, "cannot write the template's record");
            }
        }
    }

    fn read_installed(&mut self, path: &Path, vmms: &mut Vmms) {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            return;
        };
        let id = id_of_name(name);
        let read = rebuilt::choose(path, &id, self.store.images(), vmms).and_then(|(dir, vmm)| {
            let mut template = Template::read(&dir, id.clone(), &self.store)?;
            template.info.names = vec![name.to_owned()];
            // Equal for the installed and the rebuilt template.
            template.warm_up = read_warm_up(path)?;
            Ok((vmm, template))
        });
        match read {
            Ok((vmm, mut template)) => {
                template.set_vmm(vmm);
                template.rebuild = Some(Rebuild::of(path));
                template.keep_files(&self.store);
                self.by_id.insert(id, template);
            }
            Err(why) => {
                self.is_partial = true;
                tracing::warn!(template = name, why, "cannot use an installed template");
            }
        }
    }

    fn read_kept(&mut self, path: &Path, vmms: &mut Vmms) {
        let Some(id) = path.file_name().and_then(|n| n.to_str()) else {
            return;
        };
        let mut kept = match Kept::read(path) {
            Ok(kept) => kept,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A killed server did not finish this template.
                let _ = fs::remove_dir_all(path);
                return;
            }
            Err(error) => {
                self.is_partial = true;
                tracing::warn!(
                    template = id,
                    %error,
                    "cannot read template.json: ignoring the template"
                );
                return;
            }
        };
        let store = self.store_of(kept.elsewhere.as_deref());
        let read = self.read_files(id, &kept, &store).and_then(|template| {
            let vmm = match (&kept.vmm, &kept.elsewhere) {
                (Some(vmm), _) => vmms.get(vmm).map(|vmm| vmm.id)?,
                (None, Some(dir)) => maker(dir, vmms)?,
                (None, None) => vmms.current().clone(),
            };
            Ok((vmm, template))
        });
        match read {
            Ok((vmm, mut template)) => {
                let is_unnamed = kept.elsewhere.is_none() && kept.vmm.is_none();
                if is_unnamed && template.is_ours && kept.kind != TemplateKind::Disk {
                    kept.vmm = Some(vmm.clone());
                    name_vmm(path, &kept);
                }
                template.set_vmm(vmm);
                template.kept = Some(kept);
                self.store = store;
                self.by_id.insert(id.to_owned(), template);
            }
            Err(why) => {
                self.is_partial = true;
                tracing::warn!(template = id, why, "cannot use a template");
            }
        }
    }

    /// Reads the files of the template with this record. The caller sets its VMM.
    fn read_files(&self, id: &str, kept: &Kept, store: &Store) -> Result<Template, String> {
        let image = self.dir.join(id).join(IMAGE);
        let is_own = kept.elsewhere.is_none() && kept.kind != TemplateKind::Disk;
        let stored = is_own.then(|| diff::find(&image, self.images().dir()));
        let stored = stored.transpose()?.flatten();
        let mut template = match (kept.kind, kept.machine, &kept.boot) {
            (TemplateKind::Disk, Some(size), Some(boot)) => disk::read(&image, id, size, boot)?,
            (TemplateKind::Disk, ..) => return Err("its record is incomplete".to_owned()),
            _ => {
                let dir = kept.elsewhere.as_deref().unwrap_or(&image);
                Template::read(dir, id.to_owned(), store)?
            }
        };
        template.info.names.clone_from(&kept.names);
        template.info.created_unix_s = kept.created_unix_s;
        template.info.kind = kept.kind;
        template.info.source.clone_from(&kept.source);
        template.defaults = kept.defaults.clone();
        if template.boot.is_none() {
            template.boot = kept.boot.clone().filter(BootFiles::exist);
        }
        if let Some(stored) = stored {
            template.loaded_bytes = stored.header.loaded_bytes;
            template.storage = Storage::Diff(stored);
        } else if is_own && template.base.is_none() {
            let since_ns = host::monotonic_ns();
            template.storage = Storage::New { since_ns };
        }
        Ok(template)
    }

    /// The store against which a template is checked. A caller of the pool may add any directory `elsewhere`, so that
    /// directory is allowed as well.
    fn store_of(&self, elsewhere: Option<&Path>) -> Store {
        elsewhere.map_or_else(|| self.store.clone(), |dir| self.store.and(dir))
    }

    /// Checks that a snapshot of a sandbox, in `dir`, names only files in the store, and resolves them.
    pub(crate) fn check_snapshot(&self, dir: &Path) -> Result<Checked, String> {
        self.store.and(dir).check(dir)
    }

    /// The store, extended by this directory.
    pub(crate) fn store_with(&self, dir: &Path) -> Store {
        self.store.and(dir)
    }

    /// Whether there are templates that could not be read.
    pub(crate) fn is_partial(&self) -> bool {
        self.is_partial
    }

    pub(crate) fn images(&self) -> &Images {
        self.store.images()
    }

    pub(crate) fn get(&self, id: &str) -> Option<&Template> {
        self.by_id.get(id)
    }

    pub(crate) fn get_mut(&mut self, id: &str) -> Option<&mut Template> {
        self.by_id.get_mut(id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Template> {
        self.by_id.values()
    }

    /// The template with this id, name or `name:tag`.
    pub(crate) fn find(&self, reference: &str) -> Option<&Template> {
        self.by_id.get(reference).or_else(|| {
            let wanted = plain(reference);
            self.iter()
                .find(|t| t.info.names.iter().any(|name| plain(name) == wanted))
        })
    }

    /// Generates a random id for a new template and creates its directory. [`Templates::keep`] then adds the template.
    pub(crate) fn draft(&self) -> io::Result<(String, PathBuf)> {
        let id = id_of_bytes(&crate::host::random::<32>()?);
        let dir = self.dir.join(&id);
        private_dir(&dir)?;
        Ok((id, dir))
    }

    /// Checks the names of a new template.
    ///
    /// # Errors
    /// Returns [`PoolError::BadName`] if a name is malformed, is given twice, or is a template's id or the name of an
    /// installed template.
    pub(crate) fn check_names(&self, names: &[String]) -> Result<(), PoolError> {
        let mut seen = BTreeSet::new();
        for name in names {
            check_name(name)?;
            if !seen.insert(plain(name)) {
                return Err(PoolError::BadName(format!(
                    "the name {name:?} is given twice"
                )));
            }
            if self.by_id.contains_key(name) {
                return Err(PoolError::BadName(format!("{name:?} is a template's id")));
            }
            let owner = self.find(name);
            if owner.is_some_and(|t| t.kept.is_none()) {
                return Err(PoolError::BadName(format!(
                    "{name:?} is the name of an installed template"
                )));
            }
        }
        Ok(())
    }

    /// Adds a template. Removes its names from other templates. The caller must write the returned records, and undo
    /// the addition with [`Templates::unpublish`] if that fails.
    pub(crate) fn keep(
        &mut self,
        id: &str,
        names: Vec<String>,
        origin: Origin,
        created_unix_s: u64,
        vmms: &mut Vmms,
    ) -> Result<NewTemplate, PoolError> {
        let failed = |why: String| PoolError::Failed {
            what: "add a template",
            why,
        };
        let kept = origin.record(names, created_unix_s);
        let store = self.store_of(kept.elsewhere.as_deref());
        let mut template = self.read_files(id, &kept, &store).map_err(failed)?;
        let vmm = match (&kept.vmm, &kept.elsewhere) {
            (Some(vmm), _) => vmm.clone(),
            (None, Some(dir)) => maker(dir, vmms).map_err(failed)?,
            (None, None) => vmms.current().clone(),
        };
        template.set_vmm(vmm);
        let (mut records, taken) = self.take_names_from_others(id, &kept.names);
        template.kept = Some(kept);
        records.splice(0..0, template.record(&self.dir));
        self.store = store;
        let info = template.info.clone();
        self.by_id.insert(id.to_owned(), template);
        Ok(NewTemplate {
            info,
            records,
            taken,
        })
    }

    /// Removes a template from the table and returns its record, which the caller must delete. Returns `None` for an
    /// installed template, whose files remain, so the next [`Templates::open`] finds it again.
    pub(crate) fn forget(&mut self, id: &str) -> Option<TemplateRecord> {
        self.by_id.remove(id)?.record(&self.dir)
    }

    /// Makes new sandboxes of an installed template start from its rebuilt files in `dir`.
    pub(crate) fn replace(&mut self, id: &str, dir: &Path, vmm: VmmId) -> Result<(), String> {
        let rebuilt = Template::read(dir, id.to_owned(), &self.store)?;
        let template = self
            .by_id
            .get_mut(id)
            .ok_or("it was removed during the rebuild")?;
        let TemplateInfo {
            memory,
            vcpus,
            disk,
            bytes,
            created_unix_s,
            ..
        } = rebuilt.info;
        (template.info.memory, template.info.vcpus) = (memory, vcpus);
        (template.info.disk, template.info.bytes) = (disk, bytes);
        template.info.created_unix_s = created_unix_s;
        template.layer_bytes = rebuilt.layer_bytes;
        (template.dir, template.root, template.boot) = (rebuilt.dir, rebuilt.root, rebuilt.boot);
        template.loaded_bytes = rebuilt.loaded_bytes;
        template.is_ours = rebuilt.is_ours;
        template.set_vmm(vmm);
        Ok(())
    }

    /// Ids of the templates that are diffs of the template in `dir`.
    pub(crate) fn built_on(&self, dir: &Path) -> Vec<&str> {
        self.iter()
            .filter(|t| t.base.as_deref() == Some(dir))
            .map(|t| t.info.id.as_str())
            .collect()
    }
}

impl Template {
    /// Reads the files of a template with memory. The caller sets its names, its kind and its VMM.
    fn read(dir: &Path, id: String, store: &Store) -> Result<Self, String> {
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
    fn new(info: TemplateInfo, dir: PathBuf, root: PathBuf) -> Self {
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
    fn record(&self, templates: &Path) -> Option<TemplateRecord> {
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
    pub(crate) fn is_loadable(&self) -> bool {
        self.base.is_none() && self.info.kind != TemplateKind::Disk
    }

    /// Files and directories that must exist as long as the template.
    pub(crate) fn needs(&self) -> Vec<PathBuf> {
        let mut needs = vec![self.dir.clone(), self.root.clone()];
        needs.extend(self.base.clone());
        needs.extend(self.boot.iter().flat_map(BootFiles::paths));
        if let Storage::Diff(stored) = &self.storage {
            needs.extend(stored.base.clone());
        }
        needs
    }

    /// The directory with the recipe, if the template has one.
    pub(crate) fn recipe_dir(&self) -> PathBuf {
        let installed = self.rebuild.as_ref().map(|rebuild| &rebuild.installed);
        installed.unwrap_or(&self.dir).clone()
    }

    /// The origin of a copy of this template. `None` if it is not a built one.
    pub(crate) fn origin_of_copy(&self) -> Option<Origin> {
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

    fn set_vmm(&mut self, vmm: VmmId) {
        self.info.vmm = (self.info.kind != TemplateKind::Disk).then(|| vmm.clone());
        self.vmm = vmm;
    }

    /// Makes the template use links to its files, which do not change when it is reinstalled.
    fn keep_files(&mut self, store: &Store) {
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
pub(crate) fn bytes_of(dir: &Path) -> model::Bytes {
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

fn read_warm_up(dir: &Path) -> Result<Arc<[WarmUpRequest]>, String> {
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

fn directories(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found: Vec<_> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    Ok(found)
}

#[cfg(test)]
pub(crate) mod tests;
