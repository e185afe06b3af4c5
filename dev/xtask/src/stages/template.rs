//! The template `base`, as a build stage. The crate `template` has its recipe and builds it.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use model::GuestPaths;
use template::{Builder, Limits, Recipe};

use crate::{
    stages::{
        guest_dir, initramfs, layer, root_image,
        stage::{self, Built, Store},
    },
    workspace::Workspace,
};

const PLACE: &str = "templates/base";
/// Builds the template unless it is up to date.
pub(crate) fn build(store: &Store, workspace: &Workspace, vmm: &Path) -> Result<Built> {
    let guest = workspace.guest();
    let recipe = template::base(&guest_paths(&guest))?;
    let key = stage::Recipe::new("template")
        .text("recipe", &serde_json::to_string(&recipe)?)
        .path("manifest", &guest.join(guest_dir::MANIFEST))?
        .path("vmm", vmm)?;
    store.build(&key, PLACE, |out, log| make(&recipe, None, vmm, out, log))
}

/// Builds a template in the empty directory `out`, with a copy of its VMM.
pub(crate) fn make(
    recipe: &Recipe,
    files: Option<&Path>,
    vmm: &Path,
    out: &Path,
    log: &Path,
) -> Result<()> {
    let run = tempfile::Builder::new()
        .prefix("cube-template-")
        .tempdir()?;
    // The VMM refuses to write a snapshot to an existing directory, so that it never overwrites one.
    fs::remove_dir(out)?;
    let builder = Builder {
        vmm,
        run: run.path(),
        log,
        limits: Limits::default(),
    };
    let report = builder
        .build(recipe, files, out, &|_| Ok(()))
        .map_err(|error| {
            let console = error.console.join("\n");
            anyhow::Error::new(error)
                .context(format!("last lines of the guest's console:\n{console}\n"))
        })?;
    let prepared = report.prepared_in.as_secs_f64();
    let line = format!("prepared in {prepared:.1} s, {}\n", report.quiet);
    append(log, &line)?;
    if let template::Quiet::Never(_) = report.quiet {
        eprintln!(
            "warning: the guest of {} was {}",
            out.display(),
            report.quiet
        );
    }
    template::add_maker(out, vmm).with_context(|| format!("cannot add {}", vmm.display()))
}

fn append(log: &Path, line: &str) -> Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().append(true).open(log)?;
    Ok(file.write_all(line.as_bytes())?)
}

pub(crate) fn guest_paths(guest: &Path) -> GuestPaths {
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join(initramfs::FILE),
        root: guest.join(root_image::FILE),
        layer: guest.join(layer::FILE),
    }
}
