//! Builds on disk, below `<state>/builds`:
//!
//! ```text
//! upload.key                       key of upload URLs, mode 0600, created once
//! files/<template>/<hash>          uploaded archives, see [`super::uploads`]
//! copies/<build>/                  incomplete copies of other nodes' builds, see `peers::templates`
//! templates/<template>/record.json name, builds, tags
//!                      <build>.log log of an ended build
//!                      <build>.order start request of a build that is unfinished or has a template
//! ```
//! A record is replaced atomically and synced, so that a build's end and its tags reach the disk together or not at
//! all. A file that cannot be read is logged and left alone.

mod order;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use pool::durable::{Durability, private_dir, read_bounded, replace, sync_dir};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{log::BuildLog, record::TemplateRecord};
pub use order::KeptOrder;
use order::ORDER;

/// Version of the record's format.
const FORMAT: u32 = 1;
/// Maximum size of a record in bytes. A record with all builds and tags takes less than a tenth.
const MAX_RECORD: u64 = 4 << 20;
const RECORD: &str = "record.json";
const KEY: &str = "upload.key";
/// Suffix of incomplete files.
const DRAFT: &str = ".new";

/// The directory of builds.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

/// What a store contains.
#[derive(Debug, Default)]
pub struct Contents {
    pub templates: BTreeMap<String, TemplateRecord>,
    /// A record could not be read, so it is unknown which templates in the pool are needed.
    pub is_partial: bool,
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Probably written by a newer server.
    #[error("it has format {0}; this server reads format {FORMAT}")]
    Format(u32),
    #[error("it is not the JSON of a template's builds")]
    Malformed(#[source] serde_json::Error),
    #[error("{0}")]
    Inconsistent(String),
    #[error("it cannot be read")]
    Io(#[from] io::Error),
}

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    template: &'a TemplateRecord,
}

#[derive(Deserialize)]
struct Header {
    format: u32,
}

#[derive(Deserialize)]
struct Stored {
    template: TemplateRecord,
}

/// Reads a record. The format number is checked before anything else.
///
/// # Errors
/// Returns [`RecordError`].
pub fn parse(bytes: &[u8]) -> Result<TemplateRecord, RecordError> {
    let header: Header = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
    if header.format != FORMAT {
        return Err(RecordError::Format(header.format));
    }
    let stored: Stored = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
    match stored.template.check() {
        Some(why) => Err(RecordError::Inconsistent(why)),
        None => Ok(stored.template),
    }
}

fn render(template: &TemplateRecord) -> io::Result<Vec<u8>> {
    let written = Written {
        format: FORMAT,
        template,
    };
    Ok(serde_json::to_vec(&written)?)
}

impl Store {
    /// Opens the directory `dir`, and creates it if it does not exist.
    ///
    /// # Errors
    /// Returns an error if directories cannot be created or read.
    pub fn open(dir: PathBuf) -> io::Result<(Self, Contents)> {
        private_dir(&dir.join("templates"))?;
        sync_dir(&dir)?;
        sync_dir(dir.parent().unwrap_or(&dir))?;
        let this = Self { dir };
        let contents = this.read()?;
        Ok((this, contents))
    }

    fn read(&self) -> io::Result<Contents> {
        let mut contents = Contents::default();
        for entry in fs::read_dir(self.dir.join("templates"))? {
            let path = entry?.path();
            match read_record(&path) {
                Ok(Some(template)) => {
                    let same = contents.templates.values().any(|t| t.name == template.name);
                    if same {
                        contents.is_partial = true;
                        warn!(path = %path.display(), name = template.name,
                              "two built templates have the same name: ignoring this one");
                        continue;
                    }
                    contents.templates.insert(template.id.clone(), template);
                }
                // A killed server was creating or removing it.
                Ok(None) => fs::remove_dir_all(&path)?,
                Err(error) => {
                    contents.is_partial = true;
                    warn!(path = %path.display(), error = %model::chain(&error),
                          "cannot use this record of builds: ignoring it, and keeping all templates in the pool");
                }
            }
        }
        Ok(contents)
    }

    /// The directory of uploaded archives.
    #[must_use]
    pub fn files(&self) -> PathBuf {
        self.dir.join("files")
    }

    fn template_dir(&self, id: &str) -> PathBuf {
        self.dir.join("templates").join(id)
    }

    /// Writes a record. When it returns, the record survives a crash of the host. Removes logs of builds that the
    /// record does not list, and orders that no redo needs.
    ///
    /// # Errors
    /// Returns an error if it cannot be written. The previous record then remains in force.
    pub fn write(&self, template: &TemplateRecord) -> io::Result<()> {
        let dir = self.template_dir(&template.id);
        let is_new = !dir.exists();
        private_dir(&dir)?;
        replace(&dir, RECORD, &render(template)?, Durability::Host)?;
        if is_new {
            sync_dir(&self.dir.join("templates"))?;
        }
        for entry in fs::read_dir(&dir)? {
            let name = entry?.file_name();
            let name = name.to_str().unwrap_or_default();
            let log = name.strip_suffix(".log");
            let order = name.strip_suffix(ORDER);
            if log.is_some_and(|build| template.build(build).is_none())
                || order.is_some_and(|build| !template.needs_order(build))
            {
                fs::remove_file(dir.join(name))?;
            }
        }
        Ok(())
    }

    /// Removes a template with its builds and logs. Does nothing if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the record cannot be removed. A log that cannot be removed is left to the next server.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        let dir = self.template_dir(id);
        match fs::remove_file(dir.join(RECORD)) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed?,
        }
        sync_dir(&dir)?;
        if let Err(error) = fs::remove_dir_all(&dir) {
            warn!(path = %dir.display(), %error, "cannot remove the logs of a template");
        }
        Ok(())
    }

    /// Writes the log of an ended build, before its end is recorded.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub fn write_log(&self, template: &str, build: &str, log: &BuildLog) -> io::Result<()> {
        let dir = self.template_dir(template);
        let mut text = Vec::new();
        log.write(&mut text)?;
        replace(&dir, &format!("{build}.log"), &text, Durability::Host)
    }

    /// The log of an ended build. Empty if there is none, as after a crash of the server.
    ///
    /// # Errors
    /// Returns an error if it cannot be read.
    pub fn read_log(&self, template: &str, build: &str) -> io::Result<BuildLog> {
        let path = self.template_dir(template).join(format!("{build}.log"));
        match BuildLog::load(&path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(BuildLog::default()),
            read => read,
        }
    }

    /// The key of upload URLs. Created if it does not exist.
    ///
    /// # Errors
    /// Returns an error if it can neither be read nor created.
    pub fn upload_key(&self) -> io::Result<[u8; 32]> {
        match read_bounded(&self.dir.join(KEY), 32) {
            Ok(bytes) => {
                if let Ok(key) = bytes.try_into() {
                    return Ok(key);
                }
                warn!(
                    "the key of upload URLs is damaged: creating a new one, which invalidates existing upload URLs"
                );
            }
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why),
        }
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        replace(&self.dir, KEY, &key, Durability::Host)?;
        Ok(key)
    }
}

/// The record in a directory, or `None` if it has none.
fn read_record(dir: &Path) -> Result<Option<TemplateRecord>, RecordError> {
    let is_dir = fs::symlink_metadata(dir)?.is_dir();
    if !is_dir {
        return Err(RecordError::Inconsistent(
            "it is not a directory".to_owned(),
        ));
    }
    let bytes = match read_bounded(&dir.join(RECORD), MAX_RECORD) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return only_ours(dir),
        bytes => bytes?,
    };
    let template = parse(&bytes)?;
    if dir.file_name().and_then(|name| name.to_str()) == Some(&template.id) {
        return Ok(Some(template));
    }
    let of = template.id;
    Err(RecordError::Inconsistent(format!(
        "it is the record of the template {of}"
    )))
}

/// Removes a directory without a record only if this program may have created it.
fn only_ours(dir: &Path) -> Result<Option<TemplateRecord>, RecordError> {
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if ![".log", ORDER, DRAFT].iter().any(|end| name.ends_with(end)) {
            let why = format!("it has no record, and contains {name:?}");
            return Err(RecordError::Inconsistent(why));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;
    use rest::StartBuild;

    use super::*;
    use crate::{
        record::tests::{build, template, uuid},
        request::check_start,
    };

    fn ready() -> TemplateRecord {
        let mut t = template();
        t.request(build(1, &["default"]));
        t.start(&uuid(1), 2);
        t.finish(&uuid(1), Ok("p".to_owned()), 3);
        t
    }

    fn open(dir: &Path) -> (Store, Contents) {
        Store::open(dir.join("builds")).unwrap()
    }

    #[test]
    fn records_and_logs_are_read_back_and_removed_with_their_template() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = open(dir.path());
        let mut t = ready();
        store.write(&t).unwrap();
        store
            .write_log(&t.id, &uuid(1), &BuildLog::default())
            .unwrap();
        store
            .write_log(&t.id, &uuid(9), &BuildLog::default())
            .unwrap();
        let spec = check_start(StartBuild {
            from_template: Some("base".to_owned()),
            ..StartBuild::default()
        });
        let spec = spec.unwrap();
        for build in [1, 9] {
            store.write_order(&t.id, &uuid(build), &spec).unwrap();
        }
        t.public = true;
        store.write(&t).unwrap();
        let kept = |file: String| store.template_dir(&t.id).join(file).exists();
        assert!(kept(format!("{}.log", uuid(1))) && !kept(format!("{}.log", uuid(9))));
        let order = |build| store.read_order(&t.id, &uuid(build)).unwrap();
        assert_eq!(order(1).map(|order| order.spec), Some(spec));
        assert_eq!(order(9), None);
        let (_, contents) = open(dir.path());
        assert_eq!(contents.templates.get(&t.id), Some(&t));
        assert!(!contents.is_partial);
        store.remove(&t.id).unwrap();
        store.remove(&t.id).unwrap();
        assert!(open(dir.path()).1.templates.is_empty());
    }

    #[test]
    fn damaged_and_foreign_files_are_left_alone_and_incomplete_ones_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = open(dir.path());
        let t = ready();
        store.write(&t).unwrap();
        let of = |id: &str| store.template_dir(id);
        let whole = fs::read(of(&t.id).join(RECORD)).unwrap();
        let copy = |id: &str, bytes: &[u8]| {
            fs::create_dir(of(id)).unwrap();
            fs::write(of(id).join(RECORD), bytes).unwrap();
        };
        // Directories without a record: a killed server was creating the first two, and the third is foreign.
        fs::create_dir(of("empty")).unwrap();
        fs::create_dir(of("draft")).unwrap();
        fs::write(of("draft").join("record.json.new"), "{").unwrap();
        fs::write(of("draft").join("b.order"), "{").unwrap();
        let (_, contents) = open(dir.path());
        assert!(!contents.is_partial && !of("empty").exists() && !of("draft").exists());
        for (id, bytes) in [("torn", &whole[..whole.len() / 2]), ("other", &whole[..])] {
            copy(id, bytes);
            let (_, contents) = open(dir.path());
            assert!(contents.is_partial, "{id}");
            assert_eq!(contents.templates.len(), 1, "{id}");
            assert!(of(id).exists(), "{id}");
            fs::remove_dir_all(of(id)).unwrap();
        }
        fs::create_dir(of("foreign")).unwrap();
        fs::write(of("foreign").join("notes"), "").unwrap();
        fs::write(of("file"), "").unwrap();
        assert!(open(dir.path()).1.is_partial);
        assert!(of("foreign").exists() && of("file").exists());
    }

    #[test]
    fn the_upload_key_is_made_once_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = open(dir.path());
        let key = store.upload_key().unwrap();
        assert_eq!(store.upload_key().unwrap(), key);
        let path = dir.path().join("builds").join(KEY);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(&path, "short").unwrap();
        assert_ne!(store.upload_key().unwrap(), key);
        assert_ne!(key, [0; 32]);
    }

    #[test]
    fn a_record_of_a_later_format_is_refused_before_it_is_decoded() {
        let later = br#"{"format":2,"template":{"anything":1}}"#;
        assert!(matches!(parse(later), Err(RecordError::Format(2))));
        let mut t = ready();
        t.tags.clear();
        let wrong = parse(&render(&t).unwrap());
        assert!(matches!(wrong, Err(RecordError::Inconsistent(_))));
    }

    proptest! {
        #[test]
        fn a_changed_record_is_refused_or_consistent(at in 0_usize..600, byte: u8, cut in 0_usize..700) {
            let mut bytes = render(&ready()).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(cut);
            if let Ok(read) = parse(&bytes) {
                prop_assert_eq!(read.check(), None);
                prop_assert_eq!(parse(&render(&read).unwrap()).unwrap(), read);
            }
        }
    }
}
