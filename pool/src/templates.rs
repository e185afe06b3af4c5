//! The templates: their ids, names and files.
//!
//! ```text
//! <installed>/<name>/manifest.json …      made elsewhere; the id is derived from the name
//! <state>/templates/<id>/template.json    names, time, directory of the files
//!                        image/           files of a snapshot that the pool made; none for a template made elsewhere
//! ```
//! A name belongs to at most one template: giving it to another template takes it away from the previous one. `name` is
//! short for `name:default`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{
    MANIFEST_NAME, SandboxId, TEMPLATE_FORMAT, TemplateManifest, WarmUpRequest, template_file,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use vmm_control::template::LoadedTemplate;

use crate::{
    TemplateInfo,
    durable::{self, Durability, private_dir, read_bounded, replace, sync_dir},
    error::PoolError,
    record::BootFiles,
    store::Store,
};

const RECORD: &str = "template.json";
const VERSION: u32 = 1;
const MAX_FILE: u64 = 1 << 20;
const DEFAULT_TAG: &str = ":default";
const MAX_NAME: usize = 128;

/// Whether a template's memory is loaded into huge pages. Clones start fastest from there.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    /// Not loaded, because no fill has been needed yet.
    OnDisk,
    /// The memory is being copied.
    Loading,
    Loaded(Arc<LoadedTemplate>),
    /// Not loaded, and not tried again: the template is a diff (its base may be loaded), or loading failed. Clones read
    /// the memory from the template's directory.
    Unloadable,
}

#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) info: TemplateInfo,
    /// The directory of the template's files.
    pub(crate) dir: PathBuf,
    pub(crate) boot: Option<BootFiles>,
    /// Requests that warm up a clone before it becomes a warm slot. If there are none, the clone runs a command
    /// instead.
    pub(crate) warm_up: Arc<[WarmUpRequest]>,
    pub(crate) memory: Memory,
    /// Whether the pool keeps warm slots of this template.
    pub(crate) wanted: bool,
    /// See [`crate::policy::Stock::refilling`].
    pub(crate) refilling: bool,
    /// Number of consecutive failed fills.
    pub(crate) failures: u32,
    /// No fill begins before this time (CLOCK_MONOTONIC).
    pub(crate) not_before_ns: u64,
    /// The record in the state directory; `None` for an installed template.
    kept: Option<Kept>,
}

/// The contents of `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    names: Vec<String>,
    created_unix_s: u64,
    is_snapshot: bool,
    /// The sandbox from which a snapshot was made; `None` for other templates.
    source: Option<SandboxId>,
    /// The directory of the template's files; `None`: the directory `image` beside this record.
    elsewhere: Option<PathBuf>,
}

/// The directory of a template in the state directory, and the record that belongs there.
#[derive(Clone, Debug)]
pub(crate) struct TemplateRecord {
    home: PathBuf,
    kept: Kept,
}

impl TemplateRecord {
    /// Writes the record, so that it survives a crash of the host.
    pub(crate) fn write(&self) -> io::Result<()> {
        private_dir(&self.home)?;
        write_kept(&self.home, &self.kept)?;
        sync_dir(self.home.parent().unwrap_or(&self.home))
    }

    /// Removes the record first, so that a crash of the host leaves either the whole template or none.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let record = self.home.join(RECORD);
        if record.exists() {
            durable::remove_file(&record)?;
            sync_dir(&self.home)?;
        }
        durable::remove_dir(&self.home)
    }
}

/// Names that a new template took: for each template that lost names, its id and its former names.
pub(crate) type TakenNames = Vec<(String, Vec<String>)>;

/// A template that [`Templates::keep`] has added, and what must be written to disk for it.
#[derive(Debug)]
pub(crate) struct NewTemplate {
    pub(crate) info: TemplateInfo,
    /// The record of the template, then those of the templates that lose names to it. In this order a crash leaves each
    /// name with at least one template, and [`Templates::open`] gives it to one.
    pub(crate) records: Vec<TemplateRecord>,
    pub(crate) taken: TakenNames,
}

/// The origin of a new template.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// Files in a directory that the pool does not manage.
    Elsewhere(PathBuf),
    /// A snapshot of this sandbox, in the directory `image` of the template's own directory.
    Snapshot(SandboxId),
}

#[derive(Debug)]
pub(crate) struct Templates {
    /// `<state>/templates`.
    dir: PathBuf,
    store: Store,
    by_id: BTreeMap<String, Template>,
}

impl Templates {
    /// Reads the installed templates and those in the state directory. A template that this program cannot use is
    /// logged and left alone. A directory without a record, which a killed server did not finish, is removed.
    pub(crate) fn open(dir: PathBuf, installed: Option<&Path>, store: Store) -> io::Result<Self> {
        let mut this = Self {
            dir,
            store,
            by_id: BTreeMap::new(),
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

    /// Leaves each name with the newest of the templates that have it. A crash of the host may have left a name with a
    /// new template and with the one from which it was taken.
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
                tracing::error!(template = template.info.id, %error, "cannot write a template's record");
            }
        }
    }

    fn read_installed(&mut self, path: &Path) {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            return;
        };
        let id = id_of_name(name);
        match Template::read(path, id.clone(), vec![name.to_owned()], &self.store) {
            Ok(mut template) => {
                template.wanted = true;
                self.by_id.insert(id, template);
            }
            Err(why) => tracing::warn!(template = name, why, "cannot use an installed template"),
        }
    }

    fn read_kept(&mut self, path: &Path) {
        let Some(id) = path.file_name().and_then(|n| n.to_str()) else {
            return;
        };
        let kept = read_bounded(&path.join(RECORD), MAX_FILE)
            .and_then(|bytes| Ok(serde_json::from_slice::<Kept>(&bytes)?));
        let kept = match kept {
            Ok(kept) if kept.version == VERSION => kept,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A killed server did not finish this template.
                let _ = fs::remove_dir_all(path);
                return;
            }
            Ok(_) | Err(_) => {
                tracing::warn!(
                    template = id,
                    "cannot read template.json: ignoring the template"
                );
                return;
            }
        };
        let dir = kept.elsewhere.clone().unwrap_or_else(|| path.join("image"));
        let store = self.store_of(kept.elsewhere.as_deref());
        match Template::read(&dir, id.to_owned(), kept.names.clone(), &store) {
            Ok(mut template) => {
                template.info.created_unix_s = kept.created_unix_s;
                template.info.is_snapshot = kept.is_snapshot;
                template.info.source.clone_from(&kept.source);
                template.kept = Some(kept);
                self.store = store;
                self.by_id.insert(id.to_owned(), template);
            }
            Err(why) => tracing::warn!(template = id, why, "cannot use a template"),
        }
    }

    /// The store against which a template is checked. A caller of the pool may add any directory `elsewhere`, so that
    /// directory is allowed too.
    fn store_of(&self, elsewhere: Option<&Path>) -> Store {
        elsewhere.map_or_else(|| self.store.clone(), |dir| self.store.and(dir))
    }

    /// Checks that a snapshot of a sandbox, in `dir`, names only files in the store.
    pub(crate) fn check_snapshot(&self, dir: &Path) -> Result<(), String> {
        self.store.and(dir).check(dir).map(drop)
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

    pub(crate) fn ids(&self) -> Vec<String> {
        self.by_id.keys().cloned().collect()
    }

    /// The template with this id, name or `name:tag`.
    pub(crate) fn find(&self, reference: &str) -> Option<&Template> {
        self.by_id.get(reference).or_else(|| {
            let wanted = plain(reference);
            self.iter()
                .find(|t| t.info.names.iter().any(|name| plain(name) == wanted))
        })
    }

    /// Draws the id of a new template and creates its directory. [`Templates::keep`] then adds the template.
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

    /// Adds a template. Takes its names away from other templates. The caller must write the records that are
    /// returned, and undo the addition by [`Templates::unpublish`] if that fails.
    pub(crate) fn keep(
        &mut self,
        id: &str,
        names: Vec<String>,
        origin: Origin,
        created_unix_s: u64,
    ) -> Result<NewTemplate, PoolError> {
        let home = self.dir.join(id);
        let (elsewhere, source) = match origin {
            Origin::Elsewhere(dir) => (Some(dir), None),
            Origin::Snapshot(source) => (None, Some(source)),
        };
        let dir = elsewhere.clone().unwrap_or_else(|| home.join("image"));
        let failed = |why: String| PoolError::Failed {
            what: "add a template",
            why,
        };
        let store = self.store_of(elsewhere.as_deref());
        let mut template =
            Template::read(&dir, id.to_owned(), names.clone(), &store).map_err(failed)?;
        template.info.created_unix_s = created_unix_s;
        template.info.is_snapshot = source.is_some();
        template.info.source.clone_from(&source);
        let kept = Kept {
            version: VERSION,
            names,
            created_unix_s,
            is_snapshot: source.is_some(),
            source,
            elsewhere,
        };
        let (mut records, taken) = self.take_names_from_others(&kept.names);
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

    /// Undoes an addition that could not be written: forgets the template and gives names back, unless another template
    /// has got them meanwhile.
    pub(crate) fn unpublish(&mut self, id: &str, taken: TakenNames) {
        self.by_id.remove(id);
        for (loser, former) in taken {
            let free: Vec<_> = former
                .into_iter()
                .filter(|name| self.find(name).is_none_or(|t| t.info.id == loser))
                .collect();
            if let Some(template) = self.by_id.get_mut(&loser) {
                template.info.names = free;
            }
        }
    }

    /// Returns the new records of the templates that lose names, and their former names.
    fn take_names_from_others(&mut self, names: &[String]) -> (Vec<TemplateRecord>, TakenNames) {
        let wanted: BTreeSet<_> = names.iter().map(|n| plain(n)).collect();
        let (mut records, mut taken) = (Vec::new(), Vec::new());
        for template in self.by_id.values_mut().filter(|t| t.kept.is_some()) {
            let former = template.info.names.clone();
            template.info.names.retain(|n| !wanted.contains(plain(n)));
            if template.info.names != former {
                records.extend(template.record(&self.dir));
                taken.push((template.info.id.clone(), former));
            }
        }
        (records, taken)
    }

    /// Forgets a template and returns its record, which the caller must remove. Returns `None` for an installed
    /// template: its files stay, so the next [`Templates::open`] finds it again.
    pub(crate) fn forget(&mut self, id: &str) -> Option<TemplateRecord> {
        self.by_id.remove(id)?.record(&self.dir)
    }

    /// Ids of the templates that are diffs of the template in `dir`.
    pub(crate) fn built_on(&self, dir: &Path) -> Vec<&str> {
        self.iter()
            .filter(|t| base_of(&t.dir).as_deref() == Some(dir))
            .map(|t| t.info.id.as_str())
            .collect()
    }
}

impl Template {
    fn read(dir: &Path, id: String, names: Vec<String>, store: &Store) -> Result<Self, String> {
        // Resolves symbolic links, because diffs name their base by its real path.
        let dir = store.admit(dir)?;
        let manifest = store.check(&dir)?;
        // The layer of a diff contains only changed blocks, so the size of the disk is that of the base's layer.
        let disk = match &manifest.base {
            Some(base) => read_manifest(&base.dir)?.layer_sum.bytes,
            None => manifest.layer_sum.bytes,
        };
        Ok(Self {
            info: TemplateInfo {
                id,
                names,
                memory: manifest.memory,
                vcpus: manifest.vcpus,
                disk: model::Bytes(disk),
                created_unix_s: manifest.taken_at_unix_ns / 1_000_000_000,
                is_snapshot: false,
                source: None,
                spawned: 0,
                warm: 0,
            },
            boot: boot_files(&manifest, store),
            warm_up: read_warm_up(&dir)?,
            dir,
            memory: Memory::OnDisk,
            wanted: false,
            refilling: false,
            failures: 0,
            not_before_ns: 0,
            kept: None,
        })
    }

    /// The record with the present names; `None` for an installed template. `templates`: the directory of all kept
    /// templates.
    fn record(&self, templates: &Path) -> Option<TemplateRecord> {
        let kept = Kept {
            names: self.info.names.clone(),
            ..self.kept.clone()?
        };
        let home = templates.join(&self.info.id);
        Some(TemplateRecord { home, kept })
    }
}

fn write_kept(home: &Path, kept: &Kept) -> io::Result<()> {
    replace(
        home,
        RECORD,
        &serde_json::to_vec_pretty(kept)?,
        Durability::Host,
    )
}

/// # Errors
/// Returns an error if the manifest cannot be read, has another format, or has a memory size outside the supported
/// range.
pub(crate) fn read_manifest(dir: &Path) -> Result<TemplateManifest, String> {
    let path = dir.join(MANIFEST_NAME);
    let bytes = read_bounded(&path, MAX_FILE).map_err(|e| format!("{}: {e}", path.display()))?;
    let manifest: TemplateManifest =
        serde_json::from_slice(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    let memory = manifest.memory;
    if !(model::MIN_MEMORY..=model::MAX_MEMORY).contains(&memory) {
        return Err(format!("{}: memory of {memory}", path.display()));
    }
    match manifest.format {
        TEMPLATE_FORMAT => Ok(manifest),
        n => Err(format!(
            "{}: format {n}, this program reads {TEMPLATE_FORMAT}",
            path.display()
        )),
    }
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

/// The files from which a VM of this template boots. Kernel and initramfs are expected beside the root image. Returns
/// `None` if one of these files is missing or not in the store.
fn boot_files(manifest: &TemplateManifest, store: &Store) -> Option<BootFiles> {
    let guest = manifest.root.parent()?;
    Some(BootFiles {
        kernel: store.admit(&guest.join("vmlinux")).ok()?,
        initrd: store.admit(&guest.join("initramfs.cpio")).ok()?,
        root: store.admit(&manifest.root).ok()?,
    })
}

/// The base's directory if the snapshot in `dir` is a diff; `None` for a full snapshot or an unreadable manifest.
pub(crate) fn base_of(dir: &Path) -> Option<PathBuf> {
    let bytes = read_bounded(&dir.join(MANIFEST_NAME), MAX_FILE).ok()?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    Some(json.get("base")?.get("dir")?.as_str()?.into())
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

/// Strips the default tag from a name.
fn plain(name: &str) -> &str {
    name.strip_suffix(DEFAULT_TAG).unwrap_or(name)
}

fn check_name(name: &str) -> Result<(), PoolError> {
    let is_word = |word: &str| {
        let mut bytes = word.bytes();
        bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
            && bytes.all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b))
    };
    let mut words = name.split(':');
    let good = name.len() <= MAX_NAME
        && words.next().is_some_and(is_word)
        && words.next().is_none_or(is_word)
        && words.next().is_none();
    if good {
        Ok(())
    } else {
        Err(PoolError::BadName(format!(
            "{:?} is not a template name: use letters, digits and ._-/ with at most one :tag, {MAX_NAME} bytes in all",
            name.chars().take(MAX_NAME).collect::<String>()
        )))
    }
}

/// The id of an installed template, the same in every server process.
fn id_of_name(name: &str) -> String {
    id_of_bytes(&Sha256::digest(format!("installed template {name}")))
}

/// 20 lower-case letters and digits.
fn id_of_bytes(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    bytes
        .iter()
        .take(20)
        .map(|b| char::from(ALPHABET[usize::from(*b) % ALPHABET.len()]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that looks like a template.
    fn image(at: &Path, base: Option<&Path>) {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("root"), "").unwrap();
        let sum = |bytes| serde_json::json!({"bytes": bytes, "sha256": "0".repeat(64)});
        let mut json = serde_json::json!({
            "format": TEMPLATE_FORMAT, "platform": "ring3", "memory": "256MiB", "vcpus": 1,
            "hypercalls": null, "taken_at_unix_ns": 7_000_000_000_u64, "root": at.join("root"),
            "root_sum": sum(1), "kernel_sum": sum(1), "memory_sum": sum(1),
            "state_sum": sum(1), "layer_sum": sum(4096),
        });
        if let Some(base) = base {
            json["base"] = serde_json::json!({
                "dir": base, "manifest_sha256": "0".repeat(64), "extents_sum": sum(1),
            });
        }
        fs::write(at.join(MANIFEST_NAME), json.to_string()).unwrap();
    }

    fn opened(state: &Path, installed: &Path) -> Templates {
        fs::create_dir_all(state).unwrap();
        let store = Store::new([state, installed]).unwrap();
        Templates::open(state.to_owned(), Some(installed), store).unwrap()
    }

    #[test]
    fn a_template_that_names_a_file_outside_the_store_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let (installed, state) = (root.path().join("i"), root.path().join("s"));
        let other = root.path().join("other");
        image(&other, None);
        image(&installed.join("base"), None);
        image(&installed.join("diff"), Some(&installed.join("base")));
        image(&installed.join("shadow"), None);
        let manifest = installed.join("shadow").join(MANIFEST_NAME);
        let text = fs::read_to_string(&manifest).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["root"] = "/etc/passwd".into();
        fs::write(&manifest, json.to_string()).unwrap();
        image(&installed.join("diff-of-other"), Some(&other));
        image(&installed.join("linked"), None);
        std::os::unix::fs::symlink(other.join("root"), installed.join("linked/memory")).unwrap();
        let mut templates = opened(&state, &installed);
        let names: Vec<_> = templates
            .iter()
            .flat_map(|t| t.info.names.clone())
            .collect();
        let mut names: Vec<_> = names.iter().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["base", "diff"]);

        // The same is required of a snapshot that a VMM wrote.
        let pause = root.path().join("pause");
        image(&pause, Some(&installed.join("base")));
        assert_eq!(templates.check_snapshot(&pause), Ok(()));
        image(&pause, Some(&other));
        assert!(
            templates
                .check_snapshot(&pause)
                .unwrap_err()
                .contains("outside")
        );
        // A caller adds the directory: then it may be named.
        let (id, _) = templates.draft().unwrap();
        let elsewhere = Origin::Elsewhere(other.clone());
        keep(&mut templates, &id, vec!["other".into()], elsewhere, 1);
        assert_eq!(templates.check_snapshot(&pause), Ok(()));
    }

    #[test]
    fn installed_and_added_templates_are_found_by_every_name() {
        let root = tempfile::tempdir().unwrap();
        let (installed, state) = (root.path().join("i"), root.path().join("s"));
        image(&installed.join("base"), None);
        fs::create_dir(installed.join("no-template")).unwrap();
        let open = || opened(&state, &installed);
        let mut templates = open();
        let base = templates.find("base").unwrap().info.clone();
        assert_eq!((base.id.len(), base.disk.0), (20, 4096));
        assert_eq!(templates.find("base:default").unwrap().info, base);
        assert_eq!(templates.find(&base.id).unwrap().info, base);
        assert!(templates.find("base:v2").is_none());

        fs::create_dir_all(&state).unwrap();
        let names = vec!["mine".to_owned(), "mine:v2".to_owned()];
        let (id, dir) = templates.draft().unwrap();
        image(&dir.join("image"), None);
        let source = SandboxId::from_random([7; 19]);
        let origin = Origin::Snapshot(source.clone());
        keep(&mut templates, &id, names.clone(), origin, 9);
        // An unfinished template is removed at the next start.
        let (half, _) = templates.draft().unwrap();
        let templates = open();
        assert!(templates.get(&half).is_none() && !state.join(half).exists());
        let mine = &templates.find("mine:v2").unwrap().info;
        assert!(mine.is_snapshot && mine.created_unix_s == 9 && mine.names == names);
        assert_eq!(mine.source, Some(source));
        assert_eq!(templates.find("mine:default").unwrap().info.id, id);
    }

    /// Adds a template and writes its records, as the pool does.
    fn keep(
        templates: &mut Templates,
        id: &str,
        names: Vec<String>,
        origin: Origin,
        created_unix_s: u64,
    ) {
        let new = templates.keep(id, names, origin, created_unix_s).unwrap();
        new.records
            .iter()
            .try_for_each(TemplateRecord::write)
            .unwrap();
    }

    #[test]
    fn names_of_a_template_that_is_not_written_stay_with_their_owner() {
        let root = tempfile::tempdir().unwrap();
        let (installed, state) = (root.path().join("i"), root.path().join("s"));
        fs::create_dir_all(&installed).unwrap();
        fs::create_dir_all(&state).unwrap();
        let mut templates = opened(&state, &installed);
        let drafted = |templates: &Templates| {
            let (id, dir) = templates.draft().unwrap();
            image(&dir.join("image"), None);
            (id, Origin::Snapshot(SandboxId::from_random([7; 19])))
        };
        let names = || vec!["mine".to_owned(), "mine:v2".to_owned()];
        let (first, origin) = drafted(&templates);
        keep(&mut templates, &first, names(), origin, 1);
        let (second, origin) = drafted(&templates);
        let new = templates.keep(&second, names(), origin, 2).unwrap();
        assert_eq!(templates.find("mine").unwrap().info.id, second);
        templates.unpublish(&second, new.taken);
        assert_eq!(templates.find("mine").unwrap().info.id, first);

        // A crash of the host may leave the record of the new template and the old record of the other one.
        let (third, origin) = drafted(&templates);
        let new = templates.keep(&third, names(), origin, 2).unwrap();
        new.records[0].write().unwrap();
        for _ in 0..2 {
            let templates = opened(&state, &installed);
            assert_eq!(templates.find("mine:v2").unwrap().info.id, third);
            assert!(templates.get(&first).unwrap().info.names.is_empty());
        }
    }

    #[test]
    fn a_name_moves_and_malformed_names_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let (installed, state) = (root.path().join("i"), root.path().join("s"));
        image(&installed.join("base"), None);
        fs::create_dir_all(&state).unwrap();
        let mut templates = opened(&state, &installed);
        let add = |templates: &mut Templates| {
            let (id, dir) = templates.draft().unwrap();
            image(&dir.join("image"), None);
            let origin = Origin::Snapshot(SandboxId::from_random([7; 19]));
            keep(templates, &id, vec!["mine".into()], origin, 1);
            id
        };
        let first = add(&mut templates);
        let second = add(&mut templates);
        let templates = opened(&state, &installed);
        assert_eq!(templates.find("mine").unwrap().info.id, second);
        assert!(templates.get(&first).unwrap().info.names.is_empty());
        for wrong in [
            "",
            "a b",
            ":x",
            "a:b:c",
            "base",
            "-x",
            &first,
            &"x".repeat(129),
        ] {
            assert!(
                templates.check_names(&[wrong.to_owned()]).is_err(),
                "{wrong}"
            );
        }
        assert!(
            templates
                .check_names(&["a".into(), "a:default".into()])
                .is_err()
        );
        assert!(templates.check_names(&["a".into(), "a:b".into()]).is_ok());
    }
}
