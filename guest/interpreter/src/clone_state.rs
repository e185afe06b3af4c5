//! State that differs between clones of a template: the identity of the clone, and the sandbox's environment. The agent
//! writes both to a tmpfs while it handles `/init`, before it admits any other request for the sandbox. The server
//! reads them before each cell, from files that stay open.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// A file that is rewritten when a clone gets its identity.
const BOOT_ID: &str = "boot-id";
/// A file with the sandbox's environment as a JSON object; absent if it has none.
const ENVS: &str = "envs";
/// Bytes per read of the environment, which is usually smaller.
const FIRST_READ: usize = 1 << 10;
/// Largest environment in bytes; a larger one is ignored.
const MAX_ENVS: usize = 1 << 20;
/// A boot ID is a UUID and a newline.
const BOOT_ID_LEN: usize = 37;

/// Variables by name.
pub(crate) type Variables = BTreeMap<String, String>;

/// The state as last read.
#[derive(Debug)]
pub(crate) struct CloneState {
    dir: PathBuf,
    boot_id_file: Option<File>,
    boot_id: [u8; BOOT_ID_LEN],
    envs_file: Option<File>,
    envs: Vec<u8>,
    variables: Variables,
    /// Incremented when the identity changes. A host that was seeded under another number must be seeded again.
    pub(crate) generation: u64,
    /// Incremented when the environment changes.
    pub(crate) environment: u64,
}

impl CloneState {
    pub(crate) fn new(dir: &Path) -> Self {
        let mut state = Self {
            dir: dir.to_owned(),
            boot_id_file: None,
            boot_id: [0; BOOT_ID_LEN],
            envs_file: None,
            envs: Vec::new(),
            variables: Variables::new(),
            generation: 0,
            environment: 0,
        };
        state.refresh();
        state
    }

    /// Reads the files, and increments the counters if identity or environment has changed.
    pub(crate) fn refresh(&mut self) {
        // A file that cannot be read counts as changed: a needless seeding is harmless, a missing one is not.
        let boot_id = self.read_boot_id().unwrap_or([0; BOOT_ID_LEN]);
        if boot_id != self.boot_id || boot_id == [0; BOOT_ID_LEN] {
            self.boot_id = boot_id;
            self.generation += 1;
        }
        let envs = self.read_envs().unwrap_or_default();
        if envs != self.envs {
            // A file that is being written may not parse yet. It will have changed again by the next cell, and is then
            // parsed again.
            self.variables = serde_json::from_slice(&envs).unwrap_or_default();
            self.envs = envs;
            self.environment += 1;
        }
    }

    /// The sandbox's environment.
    pub(crate) fn variables(&self) -> &Variables {
        &self.variables
    }

    fn read_envs(&mut self) -> io::Result<Vec<u8>> {
        let file = match self.envs_file.take() {
            Some(file) => file,
            None => File::open(self.dir.join(ENVS))?,
        };
        let mut first = [0; FIRST_READ];
        let mut len = file.read_at(&mut first, 0)?;
        let mut envs = first.get(..len).unwrap_or_default().to_vec();
        while len > 0 && envs.len() <= MAX_ENVS {
            let at = u64::try_from(envs.len()).unwrap_or(u64::MAX);
            len = file.read_at(&mut first, at)?;
            envs.extend_from_slice(first.get(..len).unwrap_or_default());
        }
        self.envs_file = Some(file);
        if envs.len() <= MAX_ENVS {
            Ok(envs)
        } else {
            Ok(Vec::new())
        }
    }

    fn read_boot_id(&mut self) -> io::Result<[u8; BOOT_ID_LEN]> {
        let file = match self.boot_id_file.take() {
            Some(file) => file,
            None => File::open(self.dir.join(BOOT_ID))?,
        };
        let mut id = [0; BOOT_ID_LEN];
        file.read_exact_at(&mut id, 0)?;
        self.boot_id_file = Some(file);
        Ok(id)
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "6c1a3c53-8c0c-4a3f-9d5c-0d5a55b9f0aa\n";
    const SECOND: &str = "6c1a3c53-8c0c-4a3f-9d5c-0d5a55b9f0ab\n";

    #[test]
    fn a_new_identity_starts_a_new_generation() {
        let dir = tempfile::tempdir().unwrap();
        let write = |id: &str| std::fs::write(dir.path().join(BOOT_ID), id).unwrap();
        write(FIRST);
        let mut state = CloneState::new(dir.path());
        let first = state.generation;
        state.refresh();
        assert_eq!(state.generation, first);
        write(SECOND);
        state.refresh();
        assert_eq!(state.generation, first + 1);
    }

    #[test]
    fn without_a_boot_id_every_cell_is_seeded() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = CloneState::new(dir.path());
        let first = state.generation;
        state.refresh();
        assert_ne!(state.generation, first);
    }

    #[test]
    fn the_environment_is_read_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = CloneState::new(dir.path());
        let none = state.environment;
        state.refresh();
        assert_eq!(state.environment, none);
        std::fs::write(dir.path().join(ENVS), r#"{"A":"1"}"#).unwrap();
        state.refresh();
        assert_eq!(state.environment, none + 1);
        assert_eq!(state.variables().get("A").map(String::as_str), Some("1"));
        let long = format!(r#"{{"A":"{}"}}"#, "x".repeat(3 * FIRST_READ));
        std::fs::write(dir.path().join(ENVS), long).unwrap();
        state.refresh();
        assert_eq!(
            state.variables().get("A").map(String::len),
            Some(3 * FIRST_READ)
        );
        std::fs::write(dir.path().join(ENVS), "not JSON").unwrap();
        state.refresh();
        assert!(state.variables().is_empty());
    }
}
