//! The root image of the interpreter: the packages of `base`, Node, R, a JDK, compilers, and Python wheels.

use std::{path::Path, process::Command};

use anyhow::Result;

use super::Sources;
use crate::{
    stages::{
        root_image,
        stage::{Built, Recipe},
    },
    tool,
    workspace::read_list,
};

const PLACE: &str = "stages/code-interpreter-image";
pub(super) const FILE: &str = "code-interpreter.erofs";
const WHEELS: &str = "stages/code-interpreter-wheels";
/// Wheels of the Jupyter kernel that the tests install.
const KERNEL_WHEELS: &str = "stages/code-interpreter-kernel-wheels";
/// pip's options for wheels that fit the guest's Python.
const PYTHON: [&str; 12] = [
    "--python-version",
    "3.11.2",
    "--implementation",
    "cp",
    "--platform",
    "manylinux_2_28_x86_64",
    "--platform",
    "manylinux_2_27_x86_64",
    "--platform",
    "manylinux_2_17_x86_64",
    "--platform",
    "manylinux2014_x86_64",
];

/// Builds the image unless it is up to date.
pub(super) fn build(sources: &Sources<'_>) -> Result<Built> {
    let recipe_dir = sources.workspace.recipe("code-interpreter");
    let wheels = wheels(sources, WHEELS, &recipe_dir.join("requirements.txt"))?;
    let recipe = Recipe::new("code-interpreter-image")
        .text("form", "1")
        .text("release of Debian", sources.root.codename)
        .text("sources", &sources.root.sources())
        .stage("kernel", &sources.kernel.built)
        .stage("wheels", &wheels)
        .path("base", &sources.workspace.recipe("base"))?
        .path("probe", &sources.workspace.recipe("probe"))?
        .path("modules", &sources.root.root_modules())?
        .path("recipe", &recipe_dir)?;
    let packages = read_list(&recipe_dir.join("packages.txt"))?;
    sources.store.build(&recipe, PLACE, |out, log| {
        let tree = out.join("tree");
        sources
            .root
            .unpack(&sources.kernel, &packages, &tree, log)?;
        root_image::take_package_list(&tree, out)?;
        tool::run(
            Command::new("sh")
                .arg(recipe_dir.join("customize.sh"))
                .arg(&tree)
                .arg(&wheels.dir),
            log,
        )?;
        root_image::pack(&tree, &out.join(FILE), log)
    })
}

/// Downloads the wheels that the tests of Jupyter kernels install in a clone.
pub(super) fn kernel_wheels(sources: &Sources<'_>) -> Result<Built> {
    let list = "guest/interpreter/tests/kernel-requirements.txt";
    wheels(sources, KERNEL_WHEELS, &sources.workspace.root().join(list))
}

/// Downloads the wheels of a requirements file. pip checks each against the hash in the file.
fn wheels(sources: &Sources<'_>, place: &'static str, requirements: &Path) -> Result<Built> {
    let name = place.trim_start_matches("stages/");
    let recipe = Recipe::new(name)
        .text("for", &PYTHON.join(" "))
        .path("requirements", requirements)?;
    sources.store.build(&recipe, place, |out, log| {
        // Debian's Python, not another one that may come first in PATH.
        let mut pip = Command::new("/usr/bin/python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps"])
            .args(["--require-hashes", "--only-binary=:all:"])
            .args(PYTHON)
            .arg("--dest")
            .arg(out)
            .arg("--requirement")
            .arg(requirements);
        tool::run(&mut pip, log)
    })
}
