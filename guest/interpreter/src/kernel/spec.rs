//! Kernelspecs: installed Jupyter kernels and their command lines.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// Data directories whose subdirectory `kernels` is searched, in order of precedence: those of `user`, of root, of
/// locally installed software, and of the distribution.
const DATA: [&str; 4] = [
    "/home/user/.local/share/jupyter",
    "/root/.local/share/jupyter",
    "/usr/local/share/jupyter",
    "/usr/share/jupyter",
];
const FILE: &str = "kernel.json";
/// Largest `kernel.json` in bytes; a larger one is ignored.
const MAX_SPEC: u64 = 1 << 20;

/// An installed kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// The name that clients use: the name of its directory, or its language if it was found by language.
    pub(crate) name: String,
    /// The directory of its `kernel.json`.
    pub(crate) dir: PathBuf,
}

/// Kernels are equal if their directories are, whatever their names.
impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        self.dir == other.dir
    }
}

impl Eq for Kernel {}

/// The content of `kernel.json`. Other keys are for graphical clients.
#[derive(Debug, Deserialize)]
pub(crate) struct Spec {
    pub(crate) argv: Vec<String>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) language: String,
    #[serde(default)]
    pub(crate) interrupt_mode: InterruptMode,
}

/// How a kernel is interrupted.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum InterruptMode {
    #[default]
    Signal,
    Message,
}

/// An unusable `kernel.json`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpecError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is larger than {MAX_SPEC} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path} is not a kernelspec")]
    Malformed {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl Spec {
    /// Reads the kernelspec in a directory.
    pub(crate) fn load(dir: &Path) -> Result<Self, SpecError> {
        let path = dir.join(FILE);
        let read = |source| SpecError::Read {
            path: path.clone(),
            source,
        };
        if fs::metadata(&path).map_err(read)?.len() > MAX_SPEC {
            return Err(SpecError::TooLarge { path });
        }
        let text = fs::read(&path).map_err(read)?;
        serde_json::from_slice(&text).map_err(|source| SpecError::Malformed { path, source })
    }
}

/// Finds the kernel of that name, otherwise the first kernel whose language has that name. Case does not matter.
pub(crate) fn find(name: &str) -> Option<Kernel> {
    find_in(&DATA.map(PathBuf::from), name)
}

fn find_in(data: &[PathBuf], name: &str) -> Option<Kernel> {
    let name = name.trim().to_lowercase();
    let installed = installed(data);
    let called = installed.iter().find(|(own, _)| *own == name);
    let speaking = || {
        installed
            .iter()
            .find(|(_, dir)| Spec::load(dir).is_ok_and(|spec| spec.language.to_lowercase() == name))
    };
    let (_, dir) = called.or_else(speaking)?;
    let dir = dir.clone();
    (!name.is_empty()).then_some(Kernel { name, dir })
}

/// Names and directories of kernels, in order of precedence.
fn installed(data: &[PathBuf]) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for dir in data {
        let Ok(entries) = fs::read_dir(dir.join("kernels")) else {
            continue;
        };
        let mut here: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        here.sort();
        for dir in here.into_iter().filter(|dir| dir.join(FILE).is_file()) {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            found.push((name.to_lowercase(), dir.clone()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_name_and_by_language() {
        let data = tempfile::tempdir().unwrap();
        for (name, language) in [("IR", "R"), ("other", "r"), ("python3", "python")] {
            let dir = data.path().join("kernels").join(name);
            fs::create_dir_all(&dir).unwrap();
            let spec = format!(r#"{{"argv":["x"],"language":"{language}","display_name":"y"}}"#);
            fs::write(dir.join(FILE), spec).unwrap();
        }
        let data = [data.path().join("nothing"), data.path().to_owned()];
        let find = |name| find_in(&data, name).map(|kernel| kernel.dir);
        assert!(find(" ir ").unwrap().ends_with("kernels/IR"));
        assert_eq!(find_in(&data, "R"), find_in(&data, "ir"));
        assert!(find("other").unwrap().ends_with("kernels/other"));
        assert!(find("Python").unwrap().ends_with("kernels/python3"));
        assert_eq!((find("cobol"), find("")), (None, None));
    }
}
