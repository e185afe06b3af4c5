//! The template `base`, which every installation has: a booted guest that has already run typical first commands, so
//! that clones share a warm page cache.

use std::{fs, io, path::Path};

use model::{Bytes, GuestPaths, MadeBy, template_file};

use crate::{Recipe, Work, file_sum};

/// Guest memory: E2B's default for a sandbox.
const MEMORY: Bytes = Bytes::mib(512);
/// Runs of each warm-up command: the first fills the page cache, the second touches the memory that a warm run needs.
pub const WARM_UP_RUNS: usize = 2;
const PROBE: [&str; 1] = ["/usr/local/bin/probe"];
/// The command that a pool's slot runs before it waits, if its template has no `warm-up.json`.
pub const SLOT_WARM_UP: &str = "/bin/true";
/// Typical first commands of slots and users.
pub const WARM_UP: [&[&str]; 7] = [
    &PROBE,
    &[SLOT_WARM_UP],
    &["/bin/bash", "-lc", "true"],
    &["/usr/bin/python3", "-c", "print(1)"],
    &["/usr/bin/node", "-e", "0"],
    &["/usr/bin/git", "--version"],
    &["/usr/bin/curl", "--version"],
];

/// The recipe of the template `base`.
///
/// # Errors
/// Returns an error if a file of the guest cannot be read.
pub fn base(guest: &GuestPaths) -> io::Result<Recipe> {
    let runs = WARM_UP.iter().flat_map(|argv| [argv; WARM_UP_RUNS]);
    Ok(Recipe {
        warm_up: runs.map(|argv| Work::run(argv)).collect(),
        first: vec![Work::run(&PROBE)],
        ..Recipe::of(guest, MEMORY)?
    })
}

/// Adds the VMM that made the template in `dir`, and its hash. After an upgrade, the pool starts the template's clones
/// with this VMM.
///
/// # Errors
/// Returns an error if the VMM cannot be read, linked or copied.
pub fn add_maker(dir: &Path, vmm: &Path) -> io::Result<()> {
    let made_by = MadeBy {
        vmm_sha256: file_sum(vmm)?,
    };
    let text = serde_json::to_string_pretty(&made_by)?;
    fs::write(dir.join(template_file::MADE_BY), text)?;
    let carried = dir.join("cube-vmm");
    fs::hard_link(vmm, &carried).or_else(|_| fs::copy(vmm, &carried).map(drop))
}
