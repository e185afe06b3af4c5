//! The template `base`: a snapshot of a booted guest that has already run the commands that users run first, so that
//! clones share a warm page cache. The crate `template` builds it.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use model::{Bytes, GuestPaths, MadeBy, template_file};
use template::{Builder, Limits, Recipe, Work, file_sum};

use crate::{
    guest_dir, initramfs, layer, root_image,
    stage::{self, Built, Store},
    workspace::Workspace,
};

const PLACE: &str = "templates/base";
/// Guest memory: E2B's default for a sandbox.
const MEMORY: Bytes = Bytes::mib(512);
/// Runs of each warm-up command: the first fills the page cache, the second touches the memory that a warm run needs.
const WARM_UP_RUNS: usize = 2;
const PROBE: [&str; 1] = ["/usr/local/bin/probe"];
/// The commands that users run first.
pub(crate) const WARM_UP: [&[&str]; 6] = [
    &PROBE,
    &["/bin/bash", "-lc", "true"],
    &["/usr/bin/python3", "-c", "print(1)"],
    &["/usr/bin/node", "-e", "0"],
    &["/usr/bin/git", "--version"],
    &["/usr/bin/curl", "--version"],
];

/// Builds the template unless it is up to date.
pub(crate) fn build(store: &Store, workspace: &Workspace, vmm: &Path) -> Result<Built> {
    let guest = workspace.guest();
    let runs = WARM_UP.iter().flat_map(|argv| [argv; WARM_UP_RUNS]);
    let recipe = Recipe {
        warm_up: runs.map(|argv| Work::run(argv)).collect(),
        first: vec![Work::run(&PROBE)],
        ..Recipe::of(&guest_paths(&guest), MEMORY)?
    };
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
    add_maker(out, vmm)
}

fn append(log: &Path, line: &str) -> Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().append(true).open(log)?;
    Ok(file.write_all(line.as_bytes())?)
}

/// Adds the VMM that made the template, and its name: after an upgrade, the pool starts the template's clones with it.
fn add_maker(template: &Path, vmm: &Path) -> Result<()> {
    let made_by = MadeBy {
        vmm_sha256: file_sum(vmm)?,
    };
    let text = serde_json::to_string_pretty(&made_by)?;
    fs::write(template.join(template_file::MADE_BY), text)?;
    let carried = template.join("cube-vmm");
    fs::hard_link(vmm, &carried)
        .or_else(|_| fs::copy(vmm, &carried).map(drop))
        .with_context(|| format!("cannot copy {}", vmm.display()))
}

pub(crate) fn guest_paths(guest: &Path) -> GuestPaths {
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join(initramfs::FILE),
        root: guest.join(root_image::FILE),
        layer: guest.join(layer::FILE),
    }
}
