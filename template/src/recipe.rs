//! The inputs of a template.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use model::{Bytes, GuestPaths};
use serde::{Deserialize, Serialize};

use crate::sum::sparse_sum;

/// File name of the recipe in a template's directory.
pub const RECIPE_NAME: &str = "recipe.json";
/// Directory in a template's directory with the files that were copied into the guest.
pub(crate) const FILES: &str = "files";
/// The version that this release writes and reads.
const VERSION: u32 = 1;
const MAX_FILE: u64 = 1 << 20;

/// All inputs of a template, except the VMM and the files in the directory `files` next to the recipe, which are copied
/// to the same paths of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub version: u32,
    pub kernel: Input,
    pub initrd: Input,
    pub root: Input,
    /// The empty writable layer.
    pub layer: Input,
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
    /// Run in this order before the start command.
    pub setup: Vec<Work>,
    /// Arguments of a command that root runs and that may keep running, in the template and in its clones. If it fails
    /// before the guest is ready, the build fails. Empty: no command.
    pub start: Vec<String>,
    /// Repeated until it succeeds. `None`: the guest is ready once the start command runs.
    pub ready: Option<Work>,
    /// Run in this order when the guest is ready, so that clones share the memory that it leaves.
    pub warm_up: Vec<Work>,
    /// The typical first work of a clone. It is run once in a clone. The pages that are private to the clone afterwards
    /// become the template's working set.
    pub first: Vec<Work>,
}

/// A file from which a template is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Absolute path on the host.
    pub path: PathBuf,
    /// Its [`sparse_sum`].
    pub sparse_sha256: String,
}

/// A command or request in the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Work {
    /// A command. It succeeds if it exits with status 0.
    Run {
        /// The program's absolute path, and its arguments.
        argv: Vec<String>,
        /// `None`: the sandbox's default user.
        user: Option<String>,
    },
    /// A request to a server in the guest: `POST` with a body, otherwise `GET`. It succeeds if the status is 200 and
    /// the response contains `expects`.
    Request {
        /// The vsock port on which the server listens.
        port: u16,
        /// The request target, such as `/execute`.
        path: String,
        /// JSON.
        body: Option<String>,
        expects: String,
    },
}

impl Work {
    /// A command run by the sandbox's default user.
    #[must_use]
    pub fn run(argv: &[&str]) -> Self {
        Self::Run {
            argv: argv.iter().map(ToString::to_string).collect(),
            user: None,
        }
    }

    /// A command run by root.
    #[must_use]
    pub fn run_as_root(argv: &[&str]) -> Self {
        Self::Run {
            argv: argv.iter().map(ToString::to_string).collect(),
            user: Some("root".to_owned()),
        }
    }
}

impl Input {
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize().map_err(|e| at(path, &e))?;
        Ok(Self {
            sparse_sha256: sparse_sum(&path)?,
            path,
        })
    }
}

impl Recipe {
    /// A recipe that only boots these files.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn of(guest: &GuestPaths, memory: Bytes) -> io::Result<Self> {
        Ok(Self {
            version: VERSION,
            kernel: Input::of(&guest.kernel)?,
            initrd: Input::of(&guest.initrd)?,
            root: Input::of(&guest.root)?,
            layer: Input::of(&guest.layer)?,
            memory,
            vcpus: 1,
            setup: Vec::new(),
            start: Vec::new(),
            ready: None,
            warm_up: Vec::new(),
            first: Vec::new(),
        })
    }

    /// Reads the recipe of the template in `dir`. Returns `None` if the template has none.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or a later release wrote it.
    pub fn read(dir: &Path) -> io::Result<Option<Self>> {
        let path = dir.join(RECIPE_NAME);
        let mut text = String::new();
        match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(at(&path, &e)),
            Ok(file) => file
                .take(MAX_FILE)
                .read_to_string(&mut text)
                .map_err(|e| at(&path, &e))?,
        };
        #[derive(Deserialize)]
        struct Header {
            version: u32,
        }
        let Header { version } = serde_json::from_str(&text).map_err(|e| at(&path, &e))?;
        if version != VERSION {
            let why = format!("it has version {version}, but this program reads version {VERSION}");
            return Err(at(&path, &why));
        }
        serde_json::from_str(&text)
            .map_err(|e| at(&path, &e))
            .map(Some)
    }

    /// The files of the guest.
    #[must_use]
    pub fn guest(&self) -> GuestPaths {
        GuestPaths {
            kernel: self.kernel.path.clone(),
            initrd: self.initrd.path.clone(),
            root: self.root.path.clone(),
            layer: self.layer.path.clone(),
        }
    }
}

fn at(path: &Path, why: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_recipe_is_read_back_and_one_of_a_later_release_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Recipe::read(dir.path()).unwrap(), None);
        let file = dir.path().join("file");
        fs::write(&file, "content").unwrap();
        let guest = GuestPaths {
            kernel: file.clone(),
            initrd: file.clone(),
            root: file.clone(),
            layer: file,
        };
        let mut recipe = Recipe::of(&guest, Bytes::mib(256)).unwrap();
        recipe.warm_up.push(Work::run(&["/bin/true"]));
        recipe.ready = Some(Work::Request {
            port: 1,
            path: "/".into(),
            body: None,
            expects: String::new(),
        });
        let path = dir.path().join(RECIPE_NAME);
        fs::write(&path, serde_json::to_vec(&recipe).unwrap()).unwrap();
        assert_eq!(Recipe::read(dir.path()).unwrap(), Some(recipe.clone()));

        recipe.version += 1;
        fs::write(&path, serde_json::to_vec(&recipe).unwrap()).unwrap();
        let why = Recipe::read(dir.path()).unwrap_err().to_string();
        assert!(why.contains("recipe.json: it has version 2"), "{why}");
    }
}
