//! Paths of this checkout.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::stages::kernel::Origin;

/// A checkout of this repository.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// The checkout from which this program was built.
    pub(crate) fn locate() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .context("dev/xtask is not inside a checkout")?;
        Ok(Self {
            root: root.to_owned(),
        })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A file or directory of the image recipes.
    pub(crate) fn recipe(&self, name: &str) -> PathBuf {
        self.root.join("guest/images").join(name)
    }

    /// The directory of all build outputs other than cargo's.
    pub(crate) fn artifacts(&self) -> PathBuf {
        self.root.join("target/cube")
    }

    /// The directory of kernel, initramfs and images under stable names.
    pub(crate) fn guest(&self) -> PathBuf {
        self.guest_of(Origin::Release)
    }

    /// As [`Self::guest`], for guests with this kernel.
    pub(crate) fn guest_of(&self, origin: Origin) -> PathBuf {
        self.artifacts().join(format!("guest{}", origin.ending()))
    }

    /// A cargo command in this workspace.
    pub(crate) fn cargo(&self) -> Command {
        self.in_root(Command::new(cargo()))
    }

    /// Like [`Self::cargo`], for work in the background: it uses only idle cores.
    pub(crate) fn idle_cargo(&self) -> Command {
        let mut command = Command::new("chrt");
        command.args(["--idle", "0"]).arg(cargo());
        self.in_root(command)
    }

    fn in_root(&self, mut command: Command) -> Command {
        // The output goes to logs and into error messages, where colour codes are noise.
        command
            .current_dir(&self.root)
            .env("CARGO_TERM_COLOR", "never");
        command
    }

    /// Cargo's target directory, which the environment or a configuration file may have moved.
    pub(crate) fn target(&self) -> Result<PathBuf> {
        let mut command = self.cargo();
        command.args(["metadata", "--format-version=1", "--no-deps"]);
        let metadata: serde_json::Value =
            serde_json::from_str(&crate::tool::output(&mut command)?)?;
        let dir = metadata["target_directory"].as_str();
        Ok(dir
            .context("`cargo metadata` printed no target_directory")?
            .into())
    }
}

/// The lines of a recipe's list, without comments and empty lines.
pub(crate) fn read_list(path: &Path) -> Result<Vec<String>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect())
}

fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
