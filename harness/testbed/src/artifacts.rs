//! Where programs, templates and results are.

use std::path::{Path, PathBuf};

use model::{Bytes, MANIFEST_NAME, TemplateManifest};

/// What to do about anything that is missing.
pub const CURE: &str = "`cargo xtask bench` makes everything that is needed";

/// Why something is not there.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// No VMM.
    #[error("there is no cube-vmm at {path}: {CURE}, or give --vmm PATH")]
    Vmm {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// No server.
    #[error("there is no cube-api at {path}: {CURE}, or give --api PATH")]
    Api {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// No probe.
    #[error("there is no cube-netprobe at {path}: {CURE}, or give --probe PATH")]
    Probe {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// No template of that name.
    #[error("template {name} cannot be read at {path}: {CURE}")]
    Template {
        /// Its name in the scenario.
        name: String,
        /// Its manifest.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The manifest is not one.
    #[error("{path} is no template manifest: {CURE}")]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The template has other memory than the scenario wants.
    #[error("template {name} has {has} of memory, the scenario wants {wants}")]
    Memory {
        /// Its name.
        name: String,
        /// What it has.
        has: Bytes,
        /// What is wanted.
        wants: Bytes,
    },
}

/// A template that a scenario can use.
#[derive(Clone, Debug)]
pub struct Template {
    /// Its directory, absolute.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: TemplateManifest,
}

/// $CUBE_ARTIFACTS, else `target/cube` below the current directory.
#[must_use]
pub fn default_dir() -> PathBuf {
    std::env::var_os("CUBE_ARTIFACTS").map_or_else(|| "target/cube".into(), PathBuf::from)
}

/// `given`, else `cube-vmm` in $CUBE_BIN, else beside this program.
///
/// # Errors
/// It is not there.
pub fn find_vmm(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => default_vmm(),
    };
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Vmm { path }),
    }
}

/// `given`, else `cube-api` in $CUBE_BIN, else beside this program.
///
/// # Errors
/// It is not there.
pub fn find_api(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = given.map_or_else(|| default_program("cube-api"), Path::to_owned);
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Api { path }),
    }
}

/// `given`, else `cube-netprobe` in $CUBE_BIN, else beside this program.
///
/// # Errors
/// It is not there.
pub fn find_probe(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = given.map_or_else(|| default_program("cube-netprobe"), Path::to_owned);
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Probe { path }),
    }
}

/// Where the VMM is when nobody says.
#[must_use]
pub fn default_vmm() -> PathBuf {
    default_program("cube-vmm")
}

fn default_program(name: &str) -> PathBuf {
    let dir = match std::env::var_os("CUBE_BIN") {
        Some(dir) => PathBuf::from(dir),
        None => std::env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.to_owned()))
            .unwrap_or_default(),
    };
    dir.join(name)
}

/// Finds the template `name` below `artifacts`. With `memory`, its guests must have exactly that much.
///
/// # Errors
/// The manifest cannot be read or decoded, or names another size than `memory`.
pub fn find_template(
    artifacts: &Path,
    name: &str,
    memory: Option<Bytes>,
) -> Result<Template, ArtifactError> {
    let dir = artifacts.join("templates").join(name);
    let name = name.to_owned();
    let path = dir.join(MANIFEST_NAME);
    let unreadable = |source| ArtifactError::Template {
        name: name.clone(),
        path: path.clone(),
        source,
    };
    let text = std::fs::read(&path).map_err(unreadable)?;
    let manifest: TemplateManifest =
        serde_json::from_slice(&text).map_err(|source| ArtifactError::Manifest {
            path: path.clone(),
            source,
        })?;
    if let Some(wants) = memory.filter(|wants| *wants != manifest.memory) {
        let has = manifest.memory;
        return Err(ArtifactError::Memory { name, has, wants });
    }
    let dir = dir.canonicalize().map_err(unreadable)?;
    Ok(Template { dir, manifest })
}
