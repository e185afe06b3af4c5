//! The root image of a template as a directory, so that containers run the same programs as microVMs.
//!
//! `fsck.erofs` extracts it once, below the artifacts, into a directory named after the image's checksum.
//! Containers mount it read-only.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use testbed::artifacts::{self, ArtifactError};

use super::command;

/// Maximum time to extract an image.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The directory could not be created.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error("cannot extract {image} with fsck.erofs (package erofs-utils): {why}")]
    Extract { image: PathBuf, why: String },
    #[error("cannot use {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Returns the directory with the root image of a template. Extracts the image if the directory does not exist yet.
///
/// # Errors
/// Returns an error if the template has no readable manifest, or if its root image cannot be extracted.
pub fn of_template(artifacts_dir: &Path, template: &str) -> Result<PathBuf, RootError> {
    let found = artifacts::find_template(artifacts_dir, template, None)?;
    let sum: String = found.manifest.root_sum.sha256.chars().take(16).collect();
    let roots = found
        .dir
        .ancestors()
        .nth(2)
        .unwrap_or(&found.dir)
        .join("roots");
    let root = roots.join(&sum);
    if root.is_dir() {
        return Ok(root);
    }
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| RootError::Io { path, source }
    };
    // The process id in the name separates concurrent first runs. The rename makes only complete trees visible.
    let draft = roots.join(format!("{sum}.{}", std::process::id()));
    fs::create_dir_all(&roots).map_err(at(&roots))?;
    let outcome = extract(&found.manifest.root, &draft);
    let renamed = outcome.and_then(|()| fs::rename(&draft, &root).map_err(at(&root)));
    if renamed.is_err() {
        let _ = fs::remove_dir_all(&draft);
        if root.is_dir() {
            return Ok(root);
        }
    }
    renamed.map(|()| root)
}

fn extract(image: &Path, to: &Path) -> Result<(), RootError> {
    let failed = |why: String| RootError::Extract {
        image: image.to_owned(),
        why,
    };
    let mut extract = Command::new("fsck.erofs");
    extract
        .arg(format!("--extract={}", to.display()))
        .arg(image);
    let output =
        command::output(&mut extract, TIMEOUT, "fsck.erofs").map_err(|f| failed(f.message))?;
    match output.status {
        Some(0) => Ok(()),
        status => Err(failed(format!(
            "status {status:?}, {}",
            super::shorten(&output.stderr)
        ))),
    }
}
