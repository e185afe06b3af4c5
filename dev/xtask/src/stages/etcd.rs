//! The etcd programs for the tier `cluster`: Debian trixie's, and bookworm's, which is too old and must be
//! rejected. Only the programs are unpacked; nothing is installed. Both are Go programs that only need a C library.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    stages::{
        archive::{self, Suite},
        stage::{Built, Recipe, Store},
    },
    tool,
};

const PLACE: &str = "stages/etcd";
/// Releases of Debian, and the names under which their etcd is kept.
const PROGRAMS: [(&str, &str); 2] = [("trixie", "etcd"), ("bookworm", "etcd-3.4")];

/// Fetches both, unless they are there.
pub(crate) fn build(store: &Store, suites: &[Suite]) -> Result<Built> {
    let recipe = Recipe::new("etcd").text("form", "1");
    store.build(&recipe, PLACE, |out, log| make(suites, out, log))
}

fn make(suites: &[Suite], out: &Path, log: &Path) -> Result<()> {
    let suite = suites.first().context("no suite in apt's sources")?;
    for (release, name) in PROGRAMS {
        let work = out.join("work");
        fetch(&suite.of(release), &work, log)
            .with_context(|| format!("cannot fetch etcd-server of {release}"))?;
        fs::rename(work.join("tree/usr/bin/etcd"), out.join(name))?;
        fs::remove_dir_all(&work)?;
    }
    Ok(())
}

/// Downloads the package with separate package lists, because the host's sources may not include the release.
fn fetch(suite: &Suite, work: &Path, log: &Path) -> Result<()> {
    let apt = archive::apt_of(std::slice::from_ref(suite), work)?;
    tool::run(apt("apt-get").arg("update"), log)?;
    tool::run(apt("apt-get").args(["download", "etcd-server"]), log)?;
    let deb = fs::read_dir(work)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .context("apt-get downloaded no package")?;
    let mut unpack = Command::new("dpkg-deb");
    tool::run(unpack.arg("-x").arg(&deb).arg(work.join("tree")), log)
}
