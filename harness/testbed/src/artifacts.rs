//! Finds programs and templates.

use std::path::{Path, PathBuf};

use model::{Bytes, MANIFEST_NAME, TemplateManifest};

/// Advice in errors about missing files.
pub const CURE: &str = "run `cargo xtask bench`, which builds everything";

/// A program or template is missing or unusable.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("cannot find cube-vmm at {path}: {CURE}, or use --vmm PATH")]
    Vmm { path: PathBuf },
    #[error("cannot find cube-api at {path}: {CURE}, or use --api PATH")]
    Api { path: PathBuf },
    #[error("cannot find cube-netprobe at {path}: {CURE}, or use --probe PATH")]
    Probe { path: PathBuf },
    #[error("cannot find cube-egress at {path}: {CURE}, or use --egress PATH")]
    Egress { path: PathBuf },
    #[error(
        "cannot find etcd at {path}, nor in PATH: run `cargo xtask etcd`, install the package etcd-server of Debian 13 (etcd \
         3.5.13 or later), or use --etcd PATH"
    )]
    Etcd { path: PathBuf },
    #[error("cannot read template {name} at {path}: {cure}")]
    Template {
        name: String,
        /// The templates that exist, or the command that makes them.
        cure: String,
        /// Path of the manifest.
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot decode the template manifest {path}: {CURE}")]
    Manifest {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("template {name} has {has} of memory, but the scenario requires {wants}")]
    Memory {
        name: String,
        has: Bytes,
        wants: Bytes,
    },
}

/// A template that is ready for use.
#[derive(Clone, Debug)]
pub struct Template {
    /// Absolute path of its directory.
    pub dir: PathBuf,
    pub manifest: TemplateManifest,
}

/// Returns `$CUBE_ARTIFACTS`, or if that is not set, `target/cube` in the current directory.
#[must_use]
pub fn default_dir() -> PathBuf {
    std::env::var_os("CUBE_ARTIFACTS").map_or_else(|| "target/cube".into(), PathBuf::from)
}

/// Finds the VMM: `given`, or else `cube-vmm` in `$CUBE_BIN`. If that is not set, `cube-vmm` in the directory of this
/// program.
///
/// # Errors
/// Returns [`ArtifactError::Vmm`] if there is no such file.
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

/// Finds the server: `given`, or else `cube-api` in `$CUBE_BIN`. If that is not set, `cube-api` in the directory of
/// this program.
///
/// # Errors
/// Returns [`ArtifactError::Api`] if there is no such file.
pub fn find_api(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = given.map_or_else(|| default_program("cube-api"), Path::to_owned);
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Api { path }),
    }
}

/// Finds the probe: `given`, or else `cube-netprobe` in `$CUBE_BIN`. If that is not set, `cube-netprobe` in the
/// directory of this program.
///
/// # Errors
/// Returns [`ArtifactError::Probe`] if there is no such file.
pub fn find_probe(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = given.map_or_else(|| default_program("cube-netprobe"), Path::to_owned);
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Probe { path }),
    }
}

/// Finds the egress proxy: `given`, or else `cube-egress` in `$CUBE_BIN`. If that is not set, `cube-egress` in the
/// directory of this program.
///
/// # Errors
/// Returns [`ArtifactError::Egress`] if there is no such file.
pub fn find_egress(given: Option<&Path>) -> Result<PathBuf, ArtifactError> {
    let path = given.map_or_else(|| default_program("cube-egress"), Path::to_owned);
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(ArtifactError::Egress { path }),
    }
}

/// Path of the image converter: `cube-image` in `$CUBE_BIN`. If that is not set, in the directory of this program.
/// The file may not exist.
#[must_use]
pub fn default_image() -> PathBuf {
    default_program("cube-image")
}

/// Path of the egress proxy, found in the same way.
#[must_use]
pub fn default_egress() -> PathBuf {
    default_program("cube-egress")
}

/// Finds etcd: `given`, or else the program that `cargo xtask etcd` unpacks below `artifacts`, or else etcd in
/// PATH.
///
/// # Errors
/// Returns [`ArtifactError::Etcd`] if there is no such file.
pub fn find_etcd(given: Option<&Path>, artifacts: &Path) -> Result<PathBuf, ArtifactError> {
    let unpacked = artifacts.join("stages/etcd/etcd");
    let path = given.map_or_else(|| unpacked, Path::to_owned);
    let in_path = std::env::var_os("PATH").filter(|_| given.is_none());
    let in_path = std::env::split_paths(&in_path.unwrap_or_default())
        .map(|dir| dir.join("etcd"))
        .collect::<Vec<_>>();
    let found = std::iter::once(&path).chain(&in_path);
    let mut found = found.filter(|path| path.is_file());
    let found = found.find_map(|path| path.canonicalize().ok());
    found.ok_or(ArtifactError::Etcd { path })
}

/// Path at which [`find_vmm`] looks if `given` is `None`. The file may not exist.
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

/// Finds the template `name` below `artifacts`. With `memory`, the guests of the template must have exactly this amount
/// of RAM.
///
/// # Errors
/// Returns [`ArtifactError::Template`] if the manifest cannot be read, [`ArtifactError::Manifest`] if it cannot be
/// decoded, and [`ArtifactError::Memory`] if it specifies a size other than `memory`.
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
        cure: other_templates(artifacts).unwrap_or_else(|| CURE.to_owned()),
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

/// The advice to use a template that exists; `None` if there is none.
fn other_templates(artifacts: &Path) -> Option<String> {
    let entries = std::fs::read_dir(artifacts.join("templates")).ok()?;
    let built = entries
        .flatten()
        .filter(|e| e.path().join(MANIFEST_NAME).is_file());
    let mut names: Vec<String> = built
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    (!names.is_empty()).then(|| {
        format!(
            "set target.template to one of {}, or build it",
            names.join(", ")
        )
    })
}
