//! `target/cube/soak`: test suites and tools of other projects, which the soak tests put into guests.
//!
//! ```text
//! python/suite.tar      CPython's tests: Debian's package of them, in the version of the guest's Python
//! node/suite.tar        Node's tests, from the source of the guest's nodejs
//! stress-ng/suite.tar   stress-ng and the libraries that the guest lacks
//! fsx/bin/fsx           the file system exerciser, a static program
//! ```
//! The archives are unpacked at the root directory of a guest.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    progress::Progress,
    stages::{
        archive::{self, Package, Suite},
        binaries::{STATIC, TARGET},
        stage::{Recipe, Store},
    },
    tool,
};

/// From crates.io. Debian has neither fsx nor xfstests.
const FSX: &str = "0.3.2";

/// Builds a stage; the arguments are those of [`Store::build`].
type Make<'a> = &'a dyn Fn(&Path, &Path) -> Result<()>;

/// Fetches all suites that are not up to date. `guest` lists the packages of the guest's root image.
pub(crate) fn build(
    store: &Store,
    suites: &[Suite],
    guest: &[Package],
    progress: Progress,
) -> Result<()> {
    let names: Vec<_> = guest.iter().map(|package| package.name.as_str()).collect();
    let python = testsuite(guest)?;
    let node = version(guest, "nodejs")?;
    let fetches: [(Recipe, &str, Make<'_>); 3] = [
        (
            Recipe::new("python-suite").text("package", &format!("{python:?}")),
            "soak/python",
            &|out, log| {
                let (_, deb) = archive::download(&archive::apt, &python.0, &python.1, out, log)?;
                unpack(&[deb], out, log)
            },
        ),
        (
            Recipe::new("stress-ng").text("packages of the guest", &names.join(" ")),
            "soak/stress-ng",
            &|out, log| stress_ng(&names, out, log),
        ),
        (
            Recipe::new("node-suite").text("version", node),
            "soak/node",
            &|out, log| node_tests(suites, node, out, log),
        ),
    ];
    if fetches
        .iter()
        .any(|(recipe, place, _)| store.fresh(recipe, place).is_none())
    {
        archive::update(progress, &store.log("soak-packages")?)?;
    }
    for (recipe, place, make) in &fetches {
        store.build(recipe, place, make)?;
    }
    let recipe = Recipe::new("fsx").text("version", FSX);
    store.build(&recipe, "soak/fsx", fsx)?;
    Ok(())
}

/// Name and version of the package with the tests of the guest's Python.
fn testsuite(guest: &[Package]) -> Result<(String, String)> {
    let library = guest.iter().find_map(|package| {
        let python = package.name.strip_suffix("-stdlib")?;
        let is_versioned = python.starts_with("libpython3.");
        is_versioned.then(|| (format!("{python}-testsuite"), package.version.clone()))
    });
    library.context("the guest's root image has no package libpython3.*-stdlib")
}

fn version<'a>(guest: &'a [Package], name: &str) -> Result<&'a str> {
    let package = guest.iter().find(|package| package.name == name);
    let version = package.map(|package| package.version.as_str());
    version.with_context(|| format!("the guest's root image has no package {name}"))
}

fn stress_ng(guest: &[&str], out: &Path, log: &Path) -> Result<()> {
    let mut debs = Vec::new();
    for name in archive::closure("stress-ng")? {
        if !guest.contains(&name.as_str()) {
            let (version, _) = archive::candidate(&archive::apt, &name)?;
            debs.push(archive::download(&archive::apt, &name, &version, out, log)?.1);
        }
    }
    unpack(&debs, out, log)
}

/// Unpacks packages, without their documentation, and packs their files into one archive.
fn unpack(debs: &[PathBuf], out: &Path, log: &Path) -> Result<()> {
    let tree = out.join("tree");
    for deb in debs {
        tool::run(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(deb)
                .arg(&tree),
            log,
        )?;
        fs::remove_file(deb)?;
    }
    let documentation = tree.join("usr/share/doc");
    if documentation.exists() {
        fs::remove_dir_all(documentation)?;
    }
    pack(out, log)
}

/// Packs `tree` into `suite.tar` and removes it. The directories themselves are omitted, because unpacking them
/// would change the owner and the mode of the guest's directories.
fn pack(out: &Path, log: &Path) -> Result<()> {
    let script = "find . ! -type d -print0 | tar --null --no-recursion -T - --owner=0 --group=0 -cf ../suite.tar";
    let tree = out.join("tree");
    tool::run(
        Command::new("sh").args(["-c", script]).current_dir(&tree),
        log,
    )?;
    Ok(fs::remove_dir_all(tree)?)
}

/// Only the archive with the original source is fetched: Debian's patches are not applied.
fn node_tests(suites: &[Suite], version: &str, out: &Path, log: &Path) -> Result<()> {
    let apt = tempfile::tempdir()?;
    // apt does not create these, and finds no sources if lists and cache share a directory.
    for dir in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.path().join(dir))?;
    }
    let sources = apt.path().join("sources.list");
    let lines: Vec<_> = suites.iter().map(Suite::source_code_line).collect();
    fs::write(&sources, lines.join("\n") + "\n")?;
    let options = [
        format!("Dir::Etc::SourceList={}", sources.display()),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        format!("Dir::State::Lists={}/lists", apt.path().display()),
        format!("Dir::Cache={}/cache", apt.path().display()),
        "APT::Sandbox::User=root".to_owned(),
    ];
    let apt_get = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        for option in &options {
            command.args(["-o", option]);
        }
        command.arg("-q").args(arguments).current_dir(apt.path());
        tool::run(&mut command, log)
    };
    apt_get(&["update"])?;
    apt_get(&["source", "--tar-only", &format!("nodejs={version}")]).with_context(|| {
        format!("cannot fetch the source of nodejs {version}: if the archive has a newer version, run `cargo xtask prepare --refresh`")
    })?;
    let archives: BTreeSet<PathBuf> = fs::read_dir(apt.path())?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    let original = archives
        .iter()
        .find(|path| path.to_string_lossy().ends_with(".orig.tar.xz"))
        .context("the source of nodejs has no archive *.orig.tar.xz")?;
    let tree = out.join("tree");
    fs::create_dir(&tree)?;
    let mut tar = Command::new("tar");
    tar.arg("-xJf").arg(original).arg("-C").arg(&tree);
    tar.args(["--no-wildcards-match-slash", "--wildcards"]);
    tar.args(["*/test", "*/tools/test.py", "*/tools/utils.py"]);
    tool::run(&mut tar, log)?;
    pack(out, log)
}

fn fsx(out: &Path, log: &Path) -> Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .env("CARGO_TERM_COLOR", "never")
        .env("RUSTFLAGS", STATIC)
        .args(["install", "--quiet", "--locked", "--target", TARGET])
        .args(["--version", &format!("={FSX}"), "--root"])
        .arg(out)
        .arg("fsx");
    tool::run(&mut cargo, log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_have_the_version_of_the_guests_python() {
        let package = |name: &str, version: &str| Package {
            name: name.to_owned(),
            version: version.to_owned(),
            sha256: String::new(),
        };
        let guest = [
            package("libpython3-stdlib", "3.11.2-1"),
            package("libpython3.11-stdlib", "3.11.2-6"),
        ];
        let (name, version) = testsuite(&guest).unwrap();
        assert_eq!(
            (name.as_str(), version.as_str()),
            ("libpython3.11-testsuite", "3.11.2-6")
        );
        let missing = testsuite(&guest[..1]).unwrap_err().to_string();
        assert!(missing.contains("libpython3.*-stdlib"), "{missing}");
    }
}
