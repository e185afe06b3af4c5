//! The guest kernel module that registers the VMM's virtio-mmio devices. It is built against the headers of the guest's
//! kernel.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    stages::{
        kernel::Kernel,
        stage::{Recipe, Store},
    },
    tool,
    workspace::Workspace,
};

const FILE: &str = "cube_mmio.ko";

/// Builds the module and returns its path.
pub(crate) fn build(store: &Store, workspace: &Workspace, kernel: &Kernel) -> Result<PathBuf> {
    let source = workspace.recipe("guest-module");
    let recipe = Recipe::new("guest-module")
        .stage("kernel", &kernel.built)
        .path("source", &source)?;
    let place = format!("stages/guest-module{}", kernel.origin.ending());
    let built = store.build(&recipe, &place, |out, log| {
        make(&source, &kernel.headers(), out, log)
    })?;
    Ok(built.dir.join(FILE))
}

fn make(source: &Path, headers: &Path, out: &Path, log: &Path) -> Result<()> {
    let work = tempfile::tempdir_in(out)?;
    for name in ["cube_mmio.c", "Kbuild"] {
        fs::copy(source.join(name), work.path().join(name))
            .with_context(|| format!("cannot copy {name}"))?;
    }
    let mut make = Command::new("make");
    make.arg("-C").arg(headers);
    make.arg(format!("M={}", work.path().display()));
    // Headers of newer kernels contain a vmlinux, from which BTF would be made with a program of another package.
    make.arg("CONFIG_DEBUG_INFO_BTF_MODULES=");
    tool::run(make.arg("modules"), log)?;
    let module = work.path().join(FILE);
    tool::run(Command::new("strip").arg("--strip-debug").arg(&module), log)?;
    fs::rename(module, out.join(FILE))?;
    Ok(work.close()?)
}
