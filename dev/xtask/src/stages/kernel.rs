//! Guest kernels: Debian's unmodified cloud kernels, their modules, and the headers against which the guest module is
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

/// The suite of the archive that a kernel is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The host's release of Debian: the kernel of all templates.
    Release,
    /// The backports of that release: a newer kernel, which only tests boot.
    Backports,
}

impl Origin {
    /// Ending of the directories that are built for this kernel.
    pub(crate) fn ending(self) -> &'static str {
        match self {
            Self::Release => "",
            Self::Backports => "-backports",
        }
    }

    fn place(self) -> String {
        format!("stages/kernel{}", self.ending())
    }
}

/// The unpacked kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) origin: Origin,
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
    let found = store.fresh(recipe, &Origin::Release.place());
    let open = |built| Kernel::open(built, Origin::Release);
    found.map(open).transpose()
}

pub(crate) fn forget(store: &Store) -> Result<()> {
    store.forget(&Origin::Release.place())
}

pub(crate) fn build(store: &Store, codename: &str, origin: Origin) -> Result<Kernel> {
    let built = store.build(
        &recipe(codename),
        &origin.place(),
        |out, log| match origin {
            Origin::Release => make(&archive::apt, out, log),
            Origin::Backports => {
                let lists = tempfile::tempdir()?;
                let suites = [archive::backports(codename)?];
                let apt = archive::apt_of(&suites, lists.path())?;
                tool::run(apt("apt-get").arg("update"), log)?;
                make(&apt, out, log)
            }
        },
    )?;
    Kernel::open(built, origin)
}

impl Kernel {
    fn open(built: Built, origin: Origin) -> Result<Self> {
        let release = built.dir.join("release");
        let release = fs::read_to_string(&release)
            .with_context(|| format!("cannot read {}", release.display()))?;
        Ok(Self {
            origin,
            built,
            release,
        })
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

fn make(apt: &dyn Fn(&str) -> Command, out: &Path, log: &Path) -> Result<()> {
    let plan = plan_packages(apt)?;
    let mut packages = Vec::new();
    for (name, version) in &plan.packages {
        let (package, deb) = archive::download(apt, name, version, out, log)?;
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
fn plan_packages(apt: &dyn Fn(&str) -> Command) -> Result<PackagePlan> {
    let (_, depends) = archive::candidate(apt, METAPACKAGE)?;
    let release = depends
        .iter()
        .find_map(|name| name.strip_prefix("linux-image-"))
        .with_context(|| format!("{METAPACKAGE} does not depend on a kernel image"))?
        .to_owned();
    let image = format!("linux-image-{release}");
    let headers = format!("linux-headers-{release}");
    let (version, _) = archive::candidate(apt, &image)?;
    let (headers_version, depends) = archive::candidate(apt, &headers)?;
    if headers_version != version {
        bail!(
            "{headers} has version {headers_version}, but {image} has version {version}: the guest module would not \
             load; run `apt-get update`, or wait until the archive has both in the same version"
        );
    }
    let mut packages = vec![(image, version.clone()), (headers, version)];
    for name in depends {
        if name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-") {
            let (version, _) = archive::candidate(apt, &name)?;
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
