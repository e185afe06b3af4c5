//! The files of a built template that is a copy of another one.

use std::{fs, io, path::PathBuf};

use model::{MANIFEST_NAME, template_file};

use crate::{
    diff::Restorer,
    durable::{private_dir, sync_dir, sync_files},
    error::LibraryError,
    template::{IMAGE, Origin},
};

/// The files that every built template has, and an optional one. Other files in its directory are drafts.
const FILES: [&str; 4] = [
    MANIFEST_NAME,
    template_file::MEMORY,
    template_file::STATE,
    template_file::LAYER,
];
const OPTIONAL: &str = template_file::WORKING_SET;

#[derive(Debug)]
pub struct CopyPlan {
    /// The new template's id.
    pub id: String,
    /// Its directory, which exists.
    pub home: PathBuf,
    /// The directory of the files.
    pub from: PathBuf,
    pub origin: Origin,
    /// Makes the memory file if the other template is stored as a diff.
    pub restorer: Restorer,
}

impl CopyPlan {
    /// Links the files and syncs them, so that they survive a crash of the host. Links suffice, because the files never
    /// change.
    ///
    /// # Errors
    /// Returns an error if a file cannot be linked, or the memory cannot be made. The template's directory remains, without
    /// a record.
    pub fn run(&self) -> Result<(), LibraryError> {
        self.link()
            .map_err(|e| LibraryError::of_disk("copy a template", &e))
    }

    fn link(&self) -> io::Result<()> {
        self.restorer.restore(&self.from)?;
        let image = self.home.join(IMAGE);
        private_dir(&image)?;
        let link = |name: &str| fs::hard_link(self.from.join(name), image.join(name));
        let named = |name: &str, e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
        for name in FILES {
            link(name).map_err(|e| named(name, e))?;
        }
        match link(OPTIONAL) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(named(OPTIONAL, e)),
            _ => {}
        }
        // A memory file that was made from a diff is not synced yet.
        sync_files(&image)?;
        sync_dir(&self.home)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use model::SandboxId;

    use super::*;
    use crate::{
        fixtures::{restorer, saved},
        vmms::VmmId,
    };

    #[test]
    fn a_copy_has_the_files_of_the_template_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let [from, home, other] = ["from", "home", "other"].map(|name| dir.path().join(name));
        let plan = |home: &PathBuf| CopyPlan {
            id: "id".to_owned(),
            home: home.clone(),
            from: from.clone(),
            origin: saved(SandboxId::from_random([7; 19]), VmmId::default()),
            restorer: restorer(dir.path()),
        };
        for dir in [&from, &home, &other] {
            fs::create_dir(dir).unwrap();
        }
        for name in FILES.iter().chain(&["draft"]) {
            fs::write(from.join(name), name).unwrap();
        }
        plan(&home).run().unwrap();
        let mut files: Vec<_> = fs::read_dir(home.join(IMAGE))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        files.sort();
        assert_eq!(files, ["layer", "manifest.json", "memory", "state"]);
        // With the working set, and without the template.
        fs::write(from.join(OPTIONAL), "").unwrap();
        plan(&other).run().unwrap();
        fs::remove_dir_all(&from).unwrap();
        for (home, links) in [(&home, 2), (&other, 2)] {
            let memory = home.join(IMAGE).join("memory");
            assert_eq!(fs::metadata(&memory).unwrap().nlink(), links);
            assert_eq!(fs::read_to_string(&memory).unwrap(), "memory");
        }
        assert!(other.join(IMAGE).join(OPTIONAL).exists());
        fs::remove_dir_all(home.join(IMAGE)).unwrap();
        let why = plan(&home).run().unwrap_err().to_string();
        assert!(why.contains("manifest.json"), "{why}");
    }
}
