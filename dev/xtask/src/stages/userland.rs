//! Static programs that `oci-image` adds to images without a shell: bash and busybox, unpacked from Debian's packages.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    stages::{
        archive::{self, Package},
        stage::{Built, Recipe, Store},
    },
    tool,
};

/// Names of the files in `target/cube/guest`.
pub(crate) const FILES: [&str; 2] = ["bash", "busybox"];
const PLACE: &str = "stages/userland";
const PACKAGES: &str = "packages.json";
/// Packages, and the programs in them that become [`FILES`].
const PROGRAMS: [(&str, &str); 2] = [
    ("bash-static", "bin/bash-static"),
    ("busybox-static", "bin/busybox"),
];

fn recipe(codename: &str) -> Recipe {
    Recipe::new("userland")
        .text("form", "1")
        .text("release of Debian", codename)
}

pub(crate) fn fresh(store: &Store, codename: &str) -> Option<Built> {
    store.fresh(&recipe(codename), PLACE)
}

pub(crate) fn forget(store: &Store) -> Result<()> {
    store.forget(PLACE)
}

pub(crate) fn build(store: &Store, codename: &str) -> Result<Built> {
    store.build(&recipe(codename), PLACE, make)
}

pub(crate) fn packages(built: &Built) -> Result<Vec<Package>> {
    let text = fs::read(built.dir.join(PACKAGES))?;
    Ok(serde_json::from_slice(&text)?)
}

fn make(out: &Path, log: &Path) -> Result<()> {
    let mut packages = Vec::new();
    let tree = out.join("tree");
    for ((name, program), file) in PROGRAMS.into_iter().zip(FILES) {
        let (version, _) = archive::candidate(&archive::apt, name)?;
        let (package, deb) = archive::download(&archive::apt, name, &version, out, log)?;
        tool::run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&tree), log)?;
        fs::remove_file(&deb)?;
        let program = tree.join(program);
        fs::rename(&program, out.join(file))
            .with_context(|| format!("{name} has no {}", program.display()))?;
        packages.push(package);
    }
    fs::remove_dir_all(&tree)?;
    let packages = serde_json::to_string_pretty(&packages)?;
    Ok(fs::write(out.join(PACKAGES), packages)?)
}
