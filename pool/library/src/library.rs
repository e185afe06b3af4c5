//! All templates by id and name, and the VMMs that they need.
//!
//! ```text
//! <installed>/<name>/manifest.json …      made elsewhere; the id is derived from the name
//! <state>/images/<SHA-256>/               links to the files of an installed template, see [`crate::images`]
//! <state>/images/root-…/root              the root image of a disk template, and of what was made from it
//! <state>/templates/<id>/template.json    kind, names, time, directory of the files, VMM that made them
//!                        image/           files of a template that the pool made: of a disk only its layer; none for a
//!                                         template made elsewhere
//! <state>/vmms/<SHA-256>/cube-vmm         see [`crate::vmms`]
//! ```
//! A name belongs to at most one template: giving it to another template removes it from the previous one. `name` is
//! short for `name:default`.

mod naming;

pub use naming::Renamed;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, clock::monotonic_ns};

use crate::{
    diff,
    disk::{self, Guest},
    durable::private_dir,
    error::LibraryError,
    host,
    images::{BootFiles, Images},
    info::{TemplateInfo, TemplateKind},
    maker::maker,
    names::{TakenNames, check_name, id_of_bytes, id_of_name, plain},
    rebuilt::{self, Rebuild},
    record::{Kept, TemplateRecord, name_vmm},
    store::{Checked, Store},
    template::{IMAGE, Origin, Storage, Template, read_warm_up},
    vmms::{VmmId, Vmms},
};

/// A template that [`Library::keep`] has added, and the records that must be written for it.
#[derive(Debug)]
pub struct NewTemplate {
    pub info: TemplateInfo,
    /// The record of the template, then the records of the templates that lose names to it. In this order a crash
    /// leaves each name with at least one template, and [`Library::open`] gives it to one.
    pub records: Vec<TemplateRecord>,
    pub taken: TakenNames,
}

/// Name of the installed template whose kernel is preferred.
const BASE: &str = "base";

/// The templates, and the VMMs that they and sandboxes need.
#[derive(Debug)]
pub struct Library {
    /// `<state>/templates`.
    dir: PathBuf,
    store: Store,
    vmms: Vmms,
    by_id: BTreeMap<String, Template>,
    /// Whether a template could not be read, so that the files it needs are unknown.
    is_partial: bool,
}

impl Library {
    /// Reads the installed templates and those in the state directory, and keeps the VMMs that installed templates
    /// carry. Logs and ignores templates that this program cannot use. Removes directories without a record, which a
    /// killed server left unfinished.
    pub fn open(
        dir: PathBuf,
        installed: Option<&Path>,
        store: Store,
        vmms: Vmms,
    ) -> io::Result<Self> {
        let mut this = Self {
            dir,
            store,
            vmms,
            by_id: BTreeMap::new(),
            is_partial: false,
        };
        for path in installed.map(directories).transpose()?.unwrap_or_default() {
            if path.join(MANIFEST_NAME).exists() {
                this.read_installed(&path);
            }
        }
        for path in directories(&this.dir)? {
            this.read_kept(&path);
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

    fn read_installed(&mut self, path: &Path) {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            return;
        };
        let id = id_of_name(name);
        let (images, vmms) = (self.store.images(), &mut self.vmms);
        let read = rebuilt::choose(path, &id, images, vmms).and_then(|(dir, vmm)| {
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

    fn read_kept(&mut self, path: &Path) {
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
                (Some(vmm), _) => self.vmms.get(vmm).map(|vmm| vmm.id)?,
                (None, Some(dir)) => maker(dir, &mut self.vmms)?,
                (None, None) => self.vmms.current().clone(),
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
            let since_ns = monotonic_ns();
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
    pub fn check_snapshot(&self, dir: &Path) -> Result<Checked, String> {
        self.store.and(dir).check(dir)
    }

    /// The store, extended by this directory.
    pub fn store_with(&self, dir: &Path) -> Store {
        self.store.and(dir)
    }

    /// Whether there are templates that could not be read.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    pub fn images(&self) -> &Images {
        self.store.images()
    }

    pub fn vmms(&self) -> &Vmms {
        &self.vmms
    }

    pub fn vmms_mut(&mut self) -> &mut Vmms {
        &mut self.vmms
    }

    pub fn get(&self, id: &str) -> Option<&Template> {
        self.by_id.get(id)
    }

    pub fn get_mut(&mut self, id: &str) -> Option<&mut Template> {
        self.by_id.get_mut(id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Template> {
        self.by_id.values()
    }

    /// The template with this id, name or `name:tag`.
    pub fn find(&self, reference: &str) -> Option<&Template> {
        self.by_id.get(reference).or_else(|| {
            let wanted = plain(reference);
            self.iter()
                .find(|t| t.info.names.iter().any(|name| plain(name) == wanted))
        })
    }

    /// Generates a random id for a new template and creates its directory. [`Library::keep`] then adds the template.
    pub fn draft(&self) -> io::Result<(String, PathBuf)> {
        let id = id_of_bytes(&host::random::<32>()?);
        let dir = self.dir.join(&id);
        private_dir(&dir)?;
        Ok((id, dir))
    }

    /// Checks the names of a new template.
    ///
    /// # Errors
    /// Returns [`LibraryError::BadName`] if a name is malformed, is given twice, or is a template's id or the name of an
    /// installed template.
    pub fn check_names(&self, names: &[String]) -> Result<(), LibraryError> {
        let mut seen = BTreeSet::new();
        for name in names {
            check_name(name)?;
            if !seen.insert(plain(name)) {
                return Err(LibraryError::BadName(format!(
                    "the name {name:?} is given twice"
                )));
            }
            if self.by_id.contains_key(name) {
                return Err(LibraryError::BadName(format!(
                    "{name:?} is a template's id"
                )));
            }
            let owner = self.find(name);
            if owner.is_some_and(|t| t.kept.is_none()) {
                return Err(LibraryError::BadName(format!(
                    "{name:?} is the name of an installed template"
                )));
            }
        }
        Ok(())
    }

    /// Adds a template. Removes its names from other templates. The caller must write the returned records, and undo
    /// the addition with [`Library::unpublish`] if that fails.
    pub fn keep(
        &mut self,
        id: &str,
        names: Vec<String>,
        origin: Origin,
        created_unix_s: u64,
    ) -> Result<NewTemplate, LibraryError> {
        let failed = |why: String| LibraryError::Failed {
            what: "add a template",
            why,
        };
        let kept = origin.record(names, created_unix_s);
        let store = self.store_of(kept.elsewhere.as_deref());
        let mut template = self.read_files(id, &kept, &store).map_err(failed)?;
        let vmm = match (&kept.vmm, &kept.elsewhere) {
            (Some(vmm), _) => vmm.clone(),
            (None, Some(dir)) => maker(dir, &mut self.vmms).map_err(failed)?,
            (None, None) => self.vmms.current().clone(),
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
    /// installed template, whose files remain, so the next [`Library::open`] finds it again.
    pub fn forget(&mut self, id: &str) -> Option<TemplateRecord> {
        self.by_id.remove(id)?.record(&self.dir)
    }

    /// Makes new sandboxes of an installed template start from its rebuilt files in `dir`.
    pub fn replace(&mut self, id: &str, dir: &Path, vmm: VmmId) -> Result<(), String> {
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

    /// Kernel and initramfs of the installed template `base` or, without one, of the first by id that names them.
    #[must_use]
    pub fn guest(&self) -> Option<Guest> {
        let guest = |template: &Template| {
            let boot = template.boot.as_ref()?;
            Some(Guest {
                kernel: boot.kernel.clone(),
                initrd: boot.initrd.clone(),
                installed: template.rebuild.as_ref()?.installed.clone(),
            })
        };
        let is_base = |t: &&Template| t.info.names.iter().any(|name| name == BASE);
        let base = self.iter().filter(is_base).find_map(guest);
        base.or_else(|| self.iter().find_map(guest))
    }

    /// Ids of the templates that are diffs of the template in `dir`.
    pub fn built_on(&self, dir: &Path) -> Vec<&str> {
        self.iter()
            .filter(|t| t.base.as_deref() == Some(dir))
            .map(|t| t.info.id.as_str())
            .collect()
    }
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
mod tests;
