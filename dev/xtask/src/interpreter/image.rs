//! The root image of the interpreter: the packages of `base`, Node, R, a JDK, compilers, and wheels for Python.

use std::{path::Path, process::Command};

use anyhow::Result;

use super::Parts;
use crate::{
    root_image,
    stage::{Built, Recipe},
    tool,
    workspace::read_list,
};

const PLACE: &str = "stages/code-interpreter-image";
pub(super) const FILE: &str = "code-interpreter.erofs";
const WHEELS: &str = "stages/code-interpreter-wheels";
/// Where the tests find a Jupyter kernel to install.
const KERNEL_WHEELS: &str = "stages/code-interpreter-kernel-wheels";
/// The guest's Python, as pip names what fits it.
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

/// Makes the image unless it is fresh.
pub(super) fn build(parts: &Parts<'_>) -> Result<Built> {
    let recipe_dir = parts.workspace.recipe("code-interpreter");
    let wheels = wheels(parts, WHEELS, &recipe_dir.join("requirements.txt"))?;
    let recipe = Recipe::new("code-interpreter-image")
        .text("form", "1")
        .text("release of Debian", parts.root.codename)
        .text("sources", &parts.root.sources())
        .stage("kernel", &parts.kernel.built)
        .stage("wheels", &wheels)
        .path("base", &parts.workspace.recipe("base"))?
        .path("probe", &parts.workspace.recipe("probe"))?
        .path("modules", &parts.root.root_modules())?
        .path("recipe", &recipe_dir)?;
    let packages = read_list(&recipe_dir.join("packages.txt"))?;
    parts.store.build(&recipe, PLACE, |out, log| {
        let tree = out.join("tree");
        parts.root.unpack(&parts.kernel, &packages, &tree, log)?;
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

/// Fetches what the tests of Jupyter kernels install in a clone.
pub(super) fn kernel_wheels(parts: &Parts<'_>) -> Result<Built> {
    let list = "guest/interpreter/tests/kernel-requirements.txt";
    wheels(parts, KERNEL_WHEELS, &parts.workspace.root().join(list))
}

/// Fetches the wheels, each checked against the sum in the list.
fn wheels(parts: &Parts<'_>, place: &'static str, requirements: &Path) -> Result<Built> {
    let name = place.trim_start_matches("stages/");
    let recipe = Recipe::new(name)
        .text("for", &PYTHON.join(" "))
        .path("requirements", requirements)?;
    parts.store.build(&recipe, place, |out, log| {
        // The archive's own, whatever else calls itself so.
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
