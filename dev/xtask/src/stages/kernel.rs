//! The guest kernel: Debian's unmodified cloud kernel, its modules, and the headers against which the guest module is
//! built. The packages are unpacked, not installed: the host's own kernel does not change.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    stages::{
        archive::{self, Package},
        bzimage,
        modules::Modules,
        stage::{Built, Recipe, Store},
    },
    tool,
};

const METAPACKAGE: &str = "linux-image-cloud-amd64";
const PLACE: &str = "stages/kernel";

/// The unpacked kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) built: Built,
    /// The output of `uname -r` in a guest.
    pub(crate) release: String,
}

/// The inputs of the stage. The version of the kernel is not among them: the newest version is looked up only when the
/// stage is built, so the kernel stays the same until `--refresh`.
pub(crate) fn recipe(codename: &str) -> Recipe {
    Recipe::new("kernel")
        .text("form", "1")
        .text("release of Debian", codename)
        .text("metapackage", METAPACKAGE)
}

pub(crate) fn fresh(store: &Store, recipe: &Recipe) -> Result<Option<Kernel>> {
    store.fresh(recipe, PLACE).map(Kernel::open).transpose()
}

pub(crate) fn forget(store: &Store) -> Result<()> {
    store.forget(PLACE)
}

pub(crate) fn build(store: &Store, recipe: &Recipe) -> Result<Kernel> {
    Kernel::open(store.build(recipe, PLACE, make)?)
}

impl Kernel {
    fn open(built: Built) -> Result<Self> {
        let release = built.dir.join("release");
        let release = fs::read_to_string(&release)
            .with_context(|| format!("cannot read {}", release.display()))?;
        Ok(Self { built, release })
    }

    pub(crate) fn vmlinux(&self) -> PathBuf {
        self.built.dir.join("vmlinux")
    }

    /// `lib/modules/<release>` of the image package.
    pub(crate) fn modules_dir(&self) -> PathBuf {
        self.built.dir.join("lib/modules").join(&self.release)
    }

    pub(crate) fn modules(&self) -> Result<Modules> {
        Modules::load(&self.modules_dir())
    }

    /// The directory for `make -C`.
    pub(crate) fn headers(&self) -> PathBuf {
        let name = format!("linux-headers-{}", self.release);
        self.built.dir.join("usr/src").join(name)
    }

    pub(crate) fn packages(&self) -> Result<Vec<Package>> {
        let text = fs::read(self.built.dir.join("packages.json"))?;
        Ok(serde_json::from_slice(&text)?)
    }
}

fn make(out: &Path, log: &Path) -> Result<()> {
    let plan = plan_packages()?;
    let mut packages = Vec::new();
    for (name, version) in &plan.packages {
        let (package, deb) = archive::download(name, version, out, log)?;
        tool::run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(out), log)?;
        fs::remove_file(&deb)?;
        packages.push(package);
    }
    let image = out.join("boot").join(format!("vmlinuz-{}", plan.release));
    let image = fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
    fs::write(out.join("vmlinux"), bzimage::extract(&image)?)?;
    include_beside(out, &plan.release)?;
    fs::remove_dir_all(out.join("boot"))?;
    fs::write(out.join("release"), &plan.release)?;
    let packages = serde_json::to_string_pretty(&packages)?;
    Ok(fs::write(out.join("packages.json"), packages)?)
}

#[derive(Debug)]
struct PackagePlan {
    release: String,
    /// Names and versions.
    packages: Vec<(String, String)>,
}

/// The kernel image that the metapackage depends on, the headers of the same version, and the packages that those
/// headers need. Fails if the archive has the image and the headers in different versions.
fn plan_packages() -> Result<PackagePlan> {
    let (_, depends) = archive::candidate(METAPACKAGE)?;
    let release = depends
        .iter()
        .find_map(|name| name.strip_prefix("linux-image-"))
        .with_context(|| format!("{METAPACKAGE} does not depend on a kernel image"))?
        .to_owned();
    let image = format!("linux-image-{release}");
    let headers = format!("linux-headers-{release}");
    let (version, _) = archive::candidate(&image)?;
    let (headers_version, depends) = archive::candidate(&headers)?;
    if headers_version != version {
        bail!(
            "{headers} has version {headers_version}, but {image} has version {version}: the guest module would not \
             load; run `apt-get update`, or wait until the archive has both in the same version"
        );
    }
    let mut packages = vec![(image, version.clone()), (headers, version)];
    for name in depends {
        if name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-") {
            let (version, _) = archive::candidate(&name)?;
            packages.push((name, version));
        }
    }
    Ok(PackagePlan { release, packages })
}

/// Makes the headers' Makefile include the common Makefile by a relative path. The original names the path where the
/// package would be installed.
fn include_beside(out: &Path, release: &str) -> Result<()> {
    let makefile = out
        .join("usr/src")
        .join(format!("linux-headers-{release}/Makefile"));
    let text = fs::read_to_string(&makefile)
        .with_context(|| format!("cannot read {}", makefile.display()))?;
    let beside = "include $(dir $(lastword $(MAKEFILE_LIST)))../";
    fs::write(&makefile, text.replace("include /usr/src/", beside))?;
    Ok(())
}
